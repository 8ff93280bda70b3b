"""Balanced cuts of a sequence of operators into stages, by dynamic programming: those that minimise the slowest stage.

    seconds  3 1 1 1 1 5      2 stages:  3 1 1 1 1 | 5        3 stages:  3 1 | 1 1 1 | 5

Dynamic programming over the points where a cut is allowed: best(k, j) = min over i < j of max(best(k - 1, i), stage(i, j)), the optimum of
all cuts. A message occupies its channel and not its rank, so the slower of stage and message counts. Among the cuts that are no more than
`slack` slower than the optimum, those that send least are taken: they are between layers rather than inside one.

Points are numbered in order, the beginning and the end among them; a table has at [i, j] the value of the stage from point i to point j.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

SLACK: Final = 0.03
"""Relative slowdown of the slowest stage for smaller messages, and growth of the busiest rank's work (and memory) for a faster schedule.
Moved cuts of GPT-2, Llama, BERT and T5 on pp=2 and pp=4 are estimated 0.1 % slower with 0, and 0.1 % faster with 0.1."""


def best_cuts(
    seconds: Numbers, send_s: Numbers, stages: int, may: Sequence[NDArray[np.bool_]] | None = None, slack: float = SLACK
) -> tuple[list[int], float] | None:
    """The points of the cuts, and the seconds of the slowest stage. None: fewer points than cuts, or no allowed cuts.

    send_s   at each point, seconds of the messages of a cut there, one way
    may      for each stage, whether it may reach from point i to point j
    """
    ways = ways_to_cut(seconds, send_s, stages, (slack,), may)
    return ways[0] if ways else None


def ways_to_cut(
    seconds: Numbers, send_s: Numbers, stages: int, slacks: Sequence[float], may: Sequence[NDArray[np.bool_]] | None = None
) -> list[tuple[list[int], float]]:
    """The best cuts with each slack; empty if no cuts are allowed."""
    slower = _by_end(np.maximum(seconds, send_s))

    def tables(table: Numbers) -> list[Numbers]:
        return [table] * stages if may is None else [np.where(one.T, table, np.inf) for one in may]

    found = _search(np.maximum, tables(slower))
    if found is None:
        return []
    ways = []
    for slack in slacks:
        sends = np.where(slower <= found[1] * (1 + slack), send_s[:, None], np.inf)
        cuts = (_search(np.add, tables(sends)) or found)[0]
        ends = [0, *cuts, len(send_s) - 1]
        ways.append((cuts, max(float(seconds[a, b]) for a, b in pairwise(ends))))
    return ways


def least_cuts(stages: int, sizes: Sequence[Numbers]) -> tuple[list[int], float] | None:
    """The cuts (as points) that minimise the largest stage, and its size. `sizes`: a table for each stage."""
    return _search(np.maximum, [_by_end(sizes[stage]) for stage in range(stages)])


def _by_end(table: Numbers) -> Numbers:
    """The table transposed, a row for each end of a stage; infinite where a stage would end before it begins."""
    count = len(table)
    return np.where(np.tri(count, k=-1, dtype=bool), table.T, np.inf)


def _search(join: np.ufunc, tables: Sequence[Numbers]) -> tuple[list[int], float] | None:
    """The cuts (as points) with the least score. `join` combines the score so far with the next stage's entry of its table [end, begin]."""
    count = len(tables[0])
    every, made = np.arange(count), np.empty((count, count))
    score = np.full(count, np.inf)
    score[0] = 0.0
    origins = []
    for table in tables:
        join(table, score, out=made)
        origins.append(made.argmin(1))
        score = made[every, origins[-1]]
    if score[-1] == np.inf:
        return None
    cuts, point = [], count - 1
    for origin in reversed(origins[1:]):
        point = int(origin[point])
        cuts.append(point)
    return cuts[::-1], float(score[-1])
