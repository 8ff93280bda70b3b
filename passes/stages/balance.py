"""Balanced cuts of a sequence of operators into stages, by dynamic programming: the slowest stage is as fast as can be.

    seconds  3 1 1 1 1 5      2 stages:  3 1 1 1 1 | 5        3 stages:  3 1 | 1 1 1 | 5

Dynamic programming over the points where a cut may be: best(k, j) = min over i < j of max(best(k - 1, i), stage(i, j)), which is the best
of all ways to cut. A message takes its channel as long as it takes its rank nothing, so that of a cut the slower of the two counts. Among
the ways that are no more than a `slack` slower than the best, the one that sends least is taken: cuts then stand between layers rather than
inside one.

Points are numbered in order, the beginning and the end among them; a table has at [i, j] what the stage from point i to point j takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

SLACK: Final = 0.03
"""How much slower the slowest stage may be than it could be, for the sake of less that is sent."""


def best_cuts(
    seconds: Numbers, send_s: Numbers, stages: int, may: Sequence[NDArray[np.bool_]] | None = None, slack: float = SLACK
) -> tuple[list[int], float] | None:
    """The points of the cuts, and the seconds of the slowest stage. None: there are fewer points than cuts, or nothing that may be.

    send_s   at each point, of what a cut there sends, one way
    may      for each stage, between which points it may lie
    """
    ways = ways_to_cut(seconds, send_s, stages, (slack,), may)
    return ways[0] if ways else None


def ways_to_cut(
    seconds: Numbers, send_s: Numbers, stages: int, slacks: Sequence[float], may: Sequence[NDArray[np.bool_]] | None = None
) -> list[tuple[list[int], float]]:
    """The best cuts with each slack; none, if there are none with any."""
    slower = _by_end(np.maximum(seconds, send_s))
    allowed = None if may is None else [one.T for one in may]

    def tables(table: Numbers) -> list[Numbers]:
        return [table] * stages if allowed is None else [np.where(one, table, np.inf) for one in allowed]

    found = _search(np.maximum, tables(slower))
    if found is None:
        return []
    ways = []
    for slack in slacks:
        sends = np.where(slower <= found[1] * (1 + slack), send_s[:, None], np.inf)
        cuts = (_search(np.add, tables(sends)) or found)[0]
        ends = [0, *cuts, len(send_s) - 1]
        ways.append((cuts, max(float(seconds[a, b]) for a, b in zip(ends, ends[1:], strict=False))))
    return ways


def least_cuts(stages: int, sizes: Sequence[Numbers]) -> tuple[list[int], float] | None:
    """The points of the cuts under which the largest stage is as small as can be, and its size. `sizes`: of each stage."""
    return _search(np.maximum, [_by_end(sizes[stage]) for stage in range(stages)])


def _by_end(table: Numbers) -> Numbers:
    """A row for each end, as the search goes through it; infinite where a stage would end before it begins."""
    count = len(table)
    return np.where(np.tri(count, k=-1, dtype=bool), table.T, np.inf)


def _search(join: np.ufunc, tables: Sequence[Numbers]) -> tuple[list[int], float] | None:
    """The points of the cuts with the least score, of the stages so far joined with the next; a table a stage, by end and beginning."""
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
