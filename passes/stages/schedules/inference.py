"""Inference schedule: forwards alone, in the order of `interleaved`. Four ranks with one stage each, four microbatches:

    0  F0 F1 F2 F3
    1     F0 F1 F2 F3
    2        F0 F1 F2 F3
    3           F0 F1 F2 F3

It idles (p - 1) / (v m + p - 1) of the time, on p ranks with v stages each, for any m >= p, and holds nothing.
"""

from __future__ import annotations

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.passes.stages.schedules import interleaved
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
    trained = interleaved.lists(ranks, stages, microbatches, costs)
    return [[action for action in actions if action.op == "F"] for actions in trained]


SCHEDULE = ScheduleKind(
    "inference", lists, "the forward half of GPipe, arXiv 1811.06965", stages_per_rank=None, trains=False, by_costs=False
)
