"""GPipe schedule: all forwards, then all backwards. Four ranks, four microbatches:

    0  F0 F1 F2 F3                            B0    B1    B2    B3
    1     F0 F1 F2 F3                   B0    B1    B2    B3
    2        F0 F1 F2 F3          B0    B1    B2    B3
    3           F0 F1 F2 F3 B0    B1    B2    B3

Each rank idles (p - 1) / (m + p - 1) of the time, on p ranks with m microbatches, and holds the activations of all m.
"""

from __future__ import annotations

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
    return [[Action(op, rank, microbatch) for op in "FB" for microbatch in range(microbatches)] for rank in range(ranks)]


SCHEDULE = ScheduleKind("gpipe", lists, "Huang et al. 2019, GPipe, arXiv 1811.06965", by_costs=False)
