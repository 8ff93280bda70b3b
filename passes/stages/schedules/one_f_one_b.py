"""1F1B schedule: backwards as soon as a rank can, then one forward and one backward in turn. Four ranks, six microbatches:

    0  F0 F1 F2 F3                   B0    F4 B1    F5 B2       B3       B4       B5
    1     F0 F1 F2             B0    F3 B1    F4 B2    F5 B3       B4       B5
    2        F0 F1       B0    F2 B1    F3 B2    F4 B3    F5 B4       B5
    3           F0 B0    F1 B1    F2 B2    F3 B3    F4 B4    F5 B5

It idles as long as GPipe, (p - 1) / (m + p - 1) of the time; rank r holds the activations of no more than p - r microbatches.
"""

from __future__ import annotations

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.passes.stages.schedules.numbered_steps import number_microbatches
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
    return [_rank(stage, min(ranks - 1 - stage, microbatches), microbatches) for stage in range(ranks)]


def _rank(stage: int, ahead: int, microbatches: int) -> list[Action]:
    forward, backward = ("F", stage), ("B", stage)
    return number_microbatches([forward] * ahead + [forward, backward] * (microbatches - ahead) + [backward] * ahead)


SCHEDULE = ScheduleKind(
    "1f1b", lists, "PipeDream-flush: Narayanan et al. 2021, arXiv 2006.09503; figure 4 of arXiv 2104.04473", by_costs=False
)
