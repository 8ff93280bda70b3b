"""DualPipeV schedule: the stages of ZB-V; in its main phase a forward of one stage runs with a backward of the other on the same rank.

Three ranks, six microbatches, the second stages in small letters:

    0  F0 F1 F2 F3 F4 f0 i0 w0 f1 i1 w1 f2 F5 b2    f3 B0    b3    f4    B1    b4    f5    B2    b5    I3 W3 I4 W4 I5 W5
    1     F0 F1 F2 f0 F3 f1 i0 w0 f2 F4 b1    f3 B0    F5 b2    f4 B1    b3    f5    B2    b4    B3    i5 I4 w5 I5 W4 W5
    2        F0 f0 F1 f1 F2 f2 F3 b0    f3 B0    F4 b1    f4 B1    F5 b2    f5 B2    b3    B3    b4    I4 i5 I5 W4 w5 W5

Where backwards are whole (B) they are the second half of such a pair: one computes while the other's messages travel. Here they run one
after the other, and may begin one by one: with F = I each rank idles (p - 1) (F + I - W) seconds, for m >= 2p and W no longer than F. As
pairs that begin and end together and take F&B, it would be (p - 1) (F&B + B - 3W), as its authors say. A rank holds no more than 2p + 1
pairs of stage and microbatch. Fewer than 2p microbatches leave gaps where the others would be.
"""

from __future__ import annotations

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.passes.stages.schedules.numbered_steps import Step, keep_microbatches, number_microbatches
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
    full = max(microbatches, 2 * ranks)
    return keep_microbatches([number_microbatches(_steps(rank, ranks, full)) for rank in range(ranks)], microbatches)


def _steps(rank: int, ranks: int, microbatches: int) -> list[Step]:
    down, up = rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank  # ranks from here to the turn of the V
    f0, b0, f1, b1 = ("F", down), ("B", down), ("F", up), ("B", up)
    last = [up, down] * (rank + 1)
    whole, split = last[: rank + 1], last[rank + 1 :]
    weights = [("W", stage) for stage in split + [down] * after]
    return [
        *[f0] * (2 * after),
        *[f0, f1] * (rank + 1),
        *[("I", up), ("W", up), f1] * after,
        *[f0, b1, f1, b0] * (microbatches - 2 * ranks + rank + 1),
        *[b1, f1, b0] * after,
        *[("B", stage) for stage in whole],
        *[("I", stage) for stage in split],
        *[step for weight in weights[:after] for step in (weight, ("I", down))],
        *weights[after:],
    ]


SCHEDULE = ScheduleKind(
    "dualpipe_v",
    lists,
    "DeepSeek's DualPipe (README and dualpipev.py of github.com/deepseek-ai/DualPipe); Sea AI Lab, hackmd.io/@ufotalent/r1lVXsa9Jg",
    stages_per_rank=2,
    splits_backward=True,
    by_costs=False,
)
