"""From measured seconds to figures of a device: least squares of relative errors, so that small and large sizes count alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshc.cost.devices import Link
from meshc.cost.links import Way, fastest, ways

Point = tuple[float, float]
"""(amount of work, seconds it took)"""


@dataclass(frozen=True)
class Sample:
    """Seconds of a collective over so many ranks, or of a `send` of one to another. `size`: bytes, as `cost.links.ways` has them."""

    kind: str
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A figure, and the largest relative error of the predictions that it makes for what it was fitted to."""

    figure: float
    error: float


def rate(points: Sequence[Point], overhead_s: float) -> Fit:
    """Work a second where `seconds = overhead_s + work / rate`. Raises ValueError if nothing took longer than the overhead."""
    usable = [(work, seconds) for work, seconds in points if seconds > overhead_s]
    if not usable:
        raise ValueError(f"nothing of what was measured took longer than the overhead of {overhead_s} s")
    squares = sum((work / seconds) ** 2 for work, seconds in usable)
    slope = sum(work * (seconds - overhead_s) / seconds**2 for work, seconds in usable) / squares
    return Fit(1 / slope, max(abs((overhead_s + work * slope) / seconds - 1) for work, seconds in points))


def link(samples: Sequence[Sample], launch_s: float) -> tuple[Link, float]:
    """The link whose predictions fit best, and their largest relative error.

    Which way a collective takes depends on the link: they are chosen, fitted, chosen again until they stay. A collective's launch is an
    operator's; a `send` has none of its own.
    """
    launches = [0.0 if sample.kind == "send" else launch_s for sample in samples]
    sent = [max(sample.seconds - launch, 0.1 * sample.seconds) for sample, launch in zip(samples, launches, strict=True)]
    chosen = [ways(sample.kind, sample.ranks, sample.size)[0] for sample in samples]
    for _ in range(20):
        found = _fitted(list(zip(chosen, sent, strict=True)))
        again = [fastest(sample.kind, sample.ranks, sample.size, found) for sample in samples]
        if again == chosen:
            break
        chosen = again
    predicted = [launch + way.seconds(found) for launch, way in zip(launches, again, strict=True)]
    return found, max(abs(one / sample.seconds - 1) for one, sample in zip(predicted, samples, strict=True))


def _fitted(rows: Sequence[tuple[Way, float]]) -> Link:
    """latency a and seconds a byte b with the least sum of ((steps * a + moved * b) / seconds - 1)^2, neither below zero."""
    scaled = [(way.steps / seconds, way.moved / seconds) for way, seconds in rows]
    aa, ab, bb = sum(a * a for a, _ in scaled), sum(a * b for a, b in scaled), sum(b * b for _, b in scaled)
    a_one, b_one = sum(a for a, _ in scaled), sum(b for _, b in scaled)
    determinant = aa * bb - ab * ab
    a = (a_one * bb - b_one * ab) / determinant if determinant > 0 else -1.0
    b = (b_one * aa - a_one * ab) / determinant if determinant > 0 else -1.0
    if a < 0:
        a, b = 0.0, b_one / bb
    elif b <= 0:
        raise ValueError("larger messages did not take longer: the link's bandwidth cannot be told")
    return Link(a, 1 / b)

