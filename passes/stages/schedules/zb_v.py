"""ZB-V schedule: rank r holds stages r and 2p - 1 - r, so a microbatch goes down the ranks and back up, with its loss on rank 0.

Three ranks, six microbatches, the second stages in small letters:

    0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 i2 w2 F5 I0 W0 f3 i3 w3 I1 W1 f4 i4 w4 I2 W2 f5 i5 w5 I3 W3 I4 W4 I5 W5
    1     F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 F4 I0 W0 f3 i2 w2 F5 I1 W1 f4 i3 w3 I2 W2 f5 i4 w4 I3 i5 I4 W3 I5 W4 w5 W5
    2        F0 f0 F1 f1 F2 f2 i0 w0 F3 I0 W0 f3 i1 w1 F4 I1 W1 f4 i2 w2 F5 I2 W2 f5 i3 w3 I3 i4 I4 i5 I5 W3 w4 w5 W4 W5

With F = I = W each rank idles (p - 1) F seconds for m >= p, and no schedule less, since the last rank waits as long for its first input:
for m >= 2p - 1 they are the stairs at both ends, and no rank idles between its first and its last action. With fewer microbatches, or
under other costs, gradients of weights go where they fit best (`fill_gaps.py`). Every rank holds no more than 2p pairs of stage and
microbatch, each half as large as the p of 1F1B's first rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.passes.stages.schedules.fill_gaps import fastest
from meshc.passes.stages.schedules.numbered_steps import Step, keep_microbatches, number_microbatches
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs, equal_costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> Sequence[Sequence[Action]]:
    full = max(microbatches, 2 * ranks - 1)
    drawn = keep_microbatches([number_microbatches(_steps(rank, ranks, full)) for rank in range(ranks)], microbatches)
    if costs is None and full == microbatches:
        return drawn  # no stage and no rank can be any faster
    return fastest(drawn, equal_costs(stages) if costs is None else costs)


def _steps(rank: int, ranks: int, microbatches: int) -> list[Step]:
    down, up = rank, 2 * ranks - 1 - rank
    f0, i0, w0 = ("F", down), ("I", down), ("W", down)
    f1, i1, w1 = ("F", up), ("I", up), ("W", up)
    after = ranks - rank  # ranks from this one to the turn of the V
    steady = microbatches - (2 * ranks - 1 - rank)
    return [
        *[f0] * (2 * after - 1),
        *[f1, f0] * rank,
        *[f1, i1, w1] * after,
        *[f0, i0, w0, f1, i1, w1] * steady,
        *[i0, w0, f1, i1, w1] * (after - 1),
        *[i0, i1] * rank,
        *[i0, w0] * after,
        *[w1] * rank,
        *[w0] * rank,
    ]


SCHEDULE = ScheduleKind(
    "zb_v", lists, "Qi et al. 2023, section 6 of arXiv 2401.10241; arXiv 2405.15362", stages_per_rank=2, splits_backward=True
)
