"""Balance: where to cut a sequence of operators into stages so that the slowest stage is as fast as can be.

    seconds  3 1 1 1 1 5      2 stages:  3 1 1 1 1 | 5        3 stages:  3 1 | 1 1 1 | 5

Dynamic programming over the points where a cut may be: best(k, j) = min over i < j of max(best(k - 1, i), stage(i, j)), which is the best
of all ways to cut. A message takes its channel as long as it takes its rank nothing, so that of a cut the slower of the two counts. Among
the ways that are no more than a `slack` slower than the best, the one that sends least is taken: cuts then stand between layers rather than
inside one.

Points are numbered in order, the beginning and the end among them; a table has at [i, j] what the stage from point i to point j takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

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

    def allowed(stage: int, table: Numbers) -> Numbers:
        return table if may is None else np.where(may[stage], table, np.inf)

    slower = np.maximum(seconds, send_s)
    found = _search(stages, lambda stage, score: np.maximum(score, allowed(stage, slower)), seconds)
    if found is None:
        return None
    bound = found[1] * (1 + slack)
    sends = np.where(slower <= bound, send_s, np.inf)
    cheap = _search(stages, lambda stage, score: score + allowed(stage, sends), seconds)
    cuts = (cheap or found)[0]
    ends = [0, *cuts, len(send_s) - 1]
    return cuts, max(float(seconds[a, b]) for a, b in zip(ends, ends[1:], strict=False))


def least_cuts(stages: int, sizes: Sequence[Numbers]) -> tuple[list[int], float] | None:
    """The points of the cuts under which the largest stage is as small as can be, and its size. `sizes`: of each stage."""
    return _search(stages, lambda stage, score: np.maximum(score, sizes[stage]), sizes[0])


def _search(stages: int, joined: Callable[[int, Numbers], Numbers], table: Numbers) -> tuple[list[int], float] | None:
    """The points of the cuts with the least score: that of the stages so far, a column, `joined` with the next between any two points."""
    count = len(table)
    later: Any = np.triu(np.ones((count, count), dtype=bool), 1)
    score = np.full(count, np.inf)
    score[0] = 0.0
    origins = []
    for stage in range(stages):
        made = np.where(later, joined(stage, score[:, None]), np.inf)
        origins.append(made.argmin(0))
        score = made.min(0)
    if score[-1] == np.inf:
        return None
    cuts, point = [], count - 1
    for origin in reversed(origins[1:]):
        point = int(origin[point])
        cuts.append(point)
    return cuts[::-1], float(score[-1])
