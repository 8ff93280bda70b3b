"""Balance: where to cut a sequence of operators into stages so that the slowest stage is as fast as can be.

    seconds  3 1 1 1 1 5      2 stages:  3 1 1 1 1 | 5        3 stages:  3 1 | 1 1 1 | 5

Dynamic programming over the places where a cut may be: best(k, j) = min over i < j of max(best(k - 1, i), stage(i, j)), which is the best of
all ways to cut. A stage takes what its operators take, forward and backward, and what it sends. Of ways that are equally fast, the one that
sends least is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Place:
    """A position at which a cut may be made.

    position  operators before it
    seconds   that these take, forward and backward
    send_s    what goes over the cut takes, there and back
    bytes     that stages before it hold: parameters with their state, and what is kept of one microbatch
    """

    position: int
    seconds: float
    send_s: float = 0.0
    bytes: float = 0.0


def best_cuts(places: Sequence[Place], end: Place, stages: int, budgets: Sequence[float] = ()) -> tuple[list[int], float] | None:
    """Positions of the cuts, and the seconds of the slowest stage. None: there are fewer places than cuts, or no way is within the budgets.

    places   ascending, without the beginning and the end
    end      behind the last operator
    budgets  bytes that each stage may hold; no bound if empty
    """
    points = [Place(0, 0.0), *places, end]
    count = len(points)
    limits = list(budgets) or [inf] * stages
    score: list[tuple[float, float]] = [(inf, inf)] * count
    score[0] = (0.0, 0.0)
    chosen: list[list[int]] = []
    for stage in range(stages):
        after: list[tuple[float, float]] = [(inf, inf)] * count
        origin = [-1] * count
        last = stage == stages - 1
        for j in [count - 1] if last else range(stage + 1, count - 1):
            for i in range(j):
                slowest, sent = score[i]
                if slowest == inf or points[j].bytes - points[i].bytes > limits[stage]:
                    continue
                found = (max(slowest, stage_seconds(points[i], points[j])), sent + points[j].send_s)
                if found < after[j]:
                    after[j], origin[j] = found, i
        score = after
        chosen.append(origin)
    if score[-1][0] == inf:
        return None
    cuts: list[int] = []
    j = count - 1
    for origin in reversed(chosen[1:]):
        j = origin[j]
        cuts.append(points[j].position)
    return cuts[::-1], score[-1][0]


def stage_seconds(first: Place, last: Place) -> float:
    """What the stage between two cuts takes."""
    return last.seconds - first.seconds + first.send_s + last.send_s
