"""ZB-H1 schedule: 1F1B with backwards in two halves; gradients of weights fill gaps. Four ranks, six microbatches:

    0  F0 F1 F2 F3          I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    1     F0 F1 F2       I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    2        F0 F1    I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    3           F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

Rank r is r gradients of weights behind, so every rank holds p microbatches, as the first rank of 1F1B does. Each rank idles
(p - 1) (F + I - W) seconds, as long as W takes no longer than F and I.
"""

from __future__ import annotations

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.passes.stages.schedules.numbered_steps import Step, number_microbatches
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
    return [_rank(stage, min(ranks - 1 - stage, microbatches), microbatches) for stage in range(ranks)]


def _rank(stage: int, ahead: int, microbatches: int) -> list[Action]:
    steps: list[Step] = [("F", stage)] * ahead
    for backward in range(microbatches):
        if backward < microbatches - ahead:
            steps.append(("F", stage))
        steps.append(("I", stage))
        if backward >= stage:
            steps.append(("W", stage))
    return number_microbatches(steps + [("W", stage)] * min(stage, microbatches))


SCHEDULE = ScheduleKind(
    "zb_h1",
    lists,
    "Qi et al. 2023, section 2.3 of arXiv 2401.10241 (ZB-H1; ZB1P in later papers)",
    splits_backward=True,
    by_costs=False,
)
