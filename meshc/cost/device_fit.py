"""Figures of a device fitted to measured seconds: least squares of relative errors, so that small and large sizes count alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from meshc.cost.devices import Link
from meshc.cost.links import fastest, ways
from meshc.errors import StateError

Point = tuple[float, float]
"""(amount of work, seconds it took)"""


@dataclass(frozen=True)
class TimedSample:
    """Measured seconds of a collective over `ranks` ranks, or of a `send` between two. `size`: bytes, as in `cost.links.ways`."""

    kind: str
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Product:
    """Measured seconds of a matrix product, with its flops and the bytes of its operands and result."""

    flops: float
    moved: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A fitted figure, and the largest relative error of its predictions for the points it was fitted to."""

    figure: float
    error: float


def rate(points: Sequence[Point], overhead_s: float) -> Fit:
    """Work per second, by `seconds = overhead_s + work / rate`. Raises StateError if no point took longer than the overhead."""
    usable = [(work, seconds) for work, seconds in points if seconds > overhead_s]
    if not usable:
        raise StateError(f"nothing of what was measured took longer than the overhead of {overhead_s} s; measure again on an idle machine")
    squares = sum((work / seconds) ** 2 for work, seconds in usable)
    slope = sum(work * (seconds - overhead_s) / seconds**2 for work, seconds in usable) / squares
    return Fit(1 / slope, max(abs((overhead_s + work * slope) / seconds - 1) for work, seconds in points))


def products(points: Sequence[Product], overhead_s: float) -> tuple[Fit, float]:
    """(flops per second, seconds per byte that products move while they do not multiply), by
    `seconds = overhead_s + flops / rate + moved * seconds per byte`. Raises StateError if no product took longer than the overhead."""
    rows = [[one.flops / one.seconds, one.moved / one.seconds, 1 - overhead_s / one.seconds] for one in points if one.seconds > overhead_s]
    per_flop, per_byte = _not_negative(rows) if rows else (0.0, 0.0)
    if per_flop <= 0:
        return rate([(one.flops, one.seconds) for one in points], overhead_s), 0.0
    error = max(abs((overhead_s + one.flops * per_flop + one.moved * per_byte) / one.seconds - 1) for one in points)
    return Fit(1 / per_flop, error), per_byte


ROUNDS: Final = 20


def link(samples: Sequence[TimedSample]) -> tuple[Link, float, float]:
    """(the link with the best fit, a collective's overhead beside its messages in seconds, the largest relative error).

    The algorithm of a collective depends on the link: algorithms are chosen, the link is fitted, and so on in rounds. The fit minimizes
    squared logarithms of predicted / measured, so that half is as wrong as twice, with weights from the round before. Raises StateError
    if larger messages took no longer.
    """
    overheads = [float(sample.kind != "send") for sample in samples]
    chosen = [ways(sample.kind, sample.ranks, sample.size)[0] for sample in samples]
    scale = [sample.seconds for sample in samples]
    for _ in range(ROUNDS):
        rows = [
            [overhead / one, way.steps / one, way.moved / one, sample.seconds / one]
            for overhead, way, sample, one in zip(overheads, chosen, samples, scale, strict=True)
        ]
        overhead_s, latency_s, per_byte = _not_negative(rows)
        if per_byte <= 0:
            raise StateError("larger messages did not take longer, so nothing is known of the link; measure again on an idle machine")
        found = Link(latency_s, 1 / per_byte)
        chosen = [fastest(sample.kind, sample.ranks, sample.size, found) for sample in samples]
        predicted = [overhead * overhead_s + way.seconds(found) for overhead, way in zip(overheads, chosen, strict=True)]
        scale = [math.sqrt(one * _logarithmic_mean(one, sample.seconds)) for sample, one in zip(samples, predicted, strict=True)]
    return found, overhead_s, max(abs(one / sample.seconds - 1) for one, sample in zip(predicted, samples, strict=True))


def _logarithmic_mean(x: float, y: float) -> float:
    return x if abs(x - y) < 1e-9 * x else (x - y) / math.log(x / y)


def _not_negative(numbers: Sequence[Sequence[float]]) -> list[float]:
    """x that minimizes |A x - b|, [A, b] = numbers, with negative entries set to zero."""
    rows = torch.tensor(numbers, dtype=torch.float64)
    kept = list(range(rows.shape[1] - 1))
    while True:
        found = torch.linalg.lstsq(rows[:, kept], rows[:, -1:], driver="gelsd").solution.flatten().tolist()
        if not any(value < 0 for value in found):
            values = dict(zip(kept, found, strict=True))
            return [values.get(column, 0.0) for column in range(rows.shape[1] - 1)]
        kept = [column for column, value in zip(kept, found, strict=True) if value > 0]
        if not kept:
            return [0.0] * (rows.shape[1] - 1)
