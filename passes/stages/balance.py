"""Balance: where to cut a sequence of operators into stages so that the slowest stage is as fast as can be.

    seconds  3 1 1 1 1 5      2 stages:  3 1 1 1 1 | 5        3 stages:  3 1 | 1 1 1 | 5

Dynamic programming over the places where a cut may be: best(k, j) = min over i < j of max(best(k - 1, i), stage(i, j)), which is the best
of all ways to cut. Among the ways that are no more than SLACK slower than that, the one that sends least is taken: cuts then stand between
layers rather than inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

SLACK: Final = 0.03
"""How much slower the slowest stage may be than it could be, for the sake of fewer bytes sent."""


@dataclass(frozen=True)
class Place:
    """A position at which a cut may be made.

    position  operators before it
    seconds   that these take, forward and backward
    send_s    what goes over the cut takes, there and back
    """

    position: int
    seconds: float
    send_s: float = 0.0


def best_cuts(
    places: Sequence[Place], end: Place, stages: int, may: Callable[[int, Place, Place], bool] = lambda stage, first, last: True
) -> tuple[list[int], float] | None:
    """Positions of the cuts, and the seconds of the slowest stage. None: there are fewer places than cuts, or nothing that may be.

    places   ascending, without the beginning and the end
    end      behind the last operator
    may      whether a stage may lie between two places
    """
    points = [Place(0, 0.0), *places, end]
    if len(places) < stages - 1:
        return None

    def slowest(stage: int, score: float, first: Place, last: Place) -> float:
        return max(score, stage_seconds(first, last)) if may(stage, first, last) else inf

    found = _search(points, stages, slowest)
    if found is None:
        return None
    bound = found[1] * (1 + SLACK)

    def sends(stage: int, score: float, first: Place, last: Place) -> float:
        return score + last.send_s if stage_seconds(first, last) <= bound and may(stage, first, last) else inf

    cheap = _search(points, stages, sends)
    cuts = (cheap or found)[0]
    ends = [points[0], *(points[i] for i in cuts), end]
    return [points[i].position for i in cuts], max(stage_seconds(a, b) for a, b in zip(ends, ends[1:], strict=False))


def least_cuts(
    places: Sequence[Place], end: Place, stages: int, size: Callable[[int, Place, Place], float]
) -> tuple[list[int], float] | None:
    """Positions of the cuts under which the largest stage is as small as can be, and its size."""
    points = [Place(0, 0.0), *places, end]
    found = _search(points, stages, lambda stage, score, first, last: max(score, size(stage, first, last)))
    return None if found is None else ([points[i].position for i in found[0]], found[1])


def _search(points: Sequence[Place], stages: int, joined: Callable[[int, float, Place, Place], float]) -> tuple[list[int], float] | None:
    """Indices of the cuts with the least score: that of the stages so far `joined` with the next, between two points."""
    count = len(points)
    score = [0.0] + [inf] * (count - 1)
    origins: list[list[int]] = []
    for stage in range(stages):
        after, origin = [inf] * count, [-1] * count
        for j in [count - 1] if stage == stages - 1 else range(stage + 1, count - 1):
            for i in range(stage, j):
                if score[i] < inf and (found := joined(stage, score[i], points[i], points[j])) < after[j]:
                    after[j], origin[j] = found, i
        score = after
        origins.append(origin)
    if score[-1] == inf:
        return None
    cuts = []
    j = count - 1
    for origin in reversed(origins[1:]):
        j = origin[j]
        cuts.append(j)
    return cuts[::-1], score[-1]


def stage_seconds(first: Place, last: Place) -> float:
    """What the stage between two cuts takes."""
    return last.seconds - first.seconds + first.send_s + last.send_s
