"""Interleaved 1F1B schedule: rank r holds stages r, r + p, r + 2p, ..., and microbatches go round the ranks in groups.

Two ranks with two stages each, the second in small letters, four microbatches; a stage is half as long as it would be on four ranks:

    0  F0 F1 f0 f1 F2    b0    F3 b1    f2 B0    f3 B1       b2       b3    B2    B3
    1     F0 F1 f0 b0    f1 b1    F2 B0    F3 B1    f2 b2    f3 b3    B2    B3

With v stages on a rank it idles (p - 1) / (v m + p - 1) of the time, for any m >= p. A group has p microbatches; where p does not divide m
the groups are a few larger. With groups of g rank r holds no more than (v - 1) g + 2 (p - r) - 1 pairs of stage and microbatch.
"""

from __future__ import annotations

import itertools

from meshc.passes.phases.schedule_kind import ScheduleKind
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Costs


def lists(ranks: int, stages: int, microbatches: int, costs: Costs | None) -> list[list[Action]]:
    return [_rank(rank, ranks, stages // ranks, _groups(ranks, microbatches)) for rank in range(ranks)]


def _groups(ranks: int, microbatches: int) -> list[range]:
    """The microbatches in groups of p or a few more, the larger groups first."""
    rounds = max(microbatches // ranks, 1)
    size, larger = divmod(microbatches, rounds)
    starts = [index * size + min(index, larger) for index in range(rounds + 1)]
    return [range(first, after) for first, after in itertools.pairwise(starts)]


def _rank(rank: int, ranks: int, chunks: int, groups: list[range]) -> list[Action]:
    mine = [rank + chunk * ranks for chunk in range(chunks)]
    forward = [Action("F", stage, microbatch) for group in groups for stage in mine for microbatch in group]
    backward = [Action("B", stage, microbatch) for group in groups for stage in reversed(mine) for microbatch in group]
    # The first group has gone forward through all stages but the last when its first microbatch reaches the last stage; that is two steps a
    # rank from here to the last rank and back. In 1F1B it is one step, since no microbatch goes round the ranks before.
    hops = ranks - 1 - rank
    ahead = min((chunks - 1) * len(groups[0]) + (2 * hops if chunks > 1 else hops), len(forward))
    actions = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        actions += pair
    return actions + backward[len(forward) - ahead :]


SCHEDULE = ScheduleKind(
    "interleaved",
    lists,
    "Narayanan et al. 2021, section 2.2 of arXiv 2104.04473 (Megatron-LM)",
    stages_per_rank=None,
    by_costs=False,
)
