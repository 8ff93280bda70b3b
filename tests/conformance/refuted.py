"""Combinations that torch's trial takes for valid and that are not: its one call does not show it, the numbers here do.

    (operator, combination) -> what each rank holds, the arguments behind it, the reductions before and after

A NaN counts against sums and averages, which it makes NaN; of maxima and minima with one backends think differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "avg": lambda a, b: (a + b) / 2, "min": torch.minimum}


@dataclass(frozen=True)
class Counterexample:
    """Two ranks' parts of the first operand, partial over `given`, and what their results are then said to be partial over."""

    operator: Any
    parts: tuple[tuple[float, ...], tuple[float, ...]]
    rest: tuple[Any, ...]
    given: str
    left: str

    def results(self) -> tuple[Tensor, Tensor]:
        """(what the operator gives, what the ranks give together)."""
        first, second = map(torch.tensor, self.parts)
        whole = self.operator(REDUCTIONS[self.given](first, second), *self.rest)
        return whole, REDUCTIONS[self.left](self.operator(first, *self.rest), self.operator(second, *self.rest))


REFUTED = {
    ("aten.linalg_vector_norm.default", "P(min) -> P(min)"): Counterexample(
        aten.linalg_vector_norm.default, ((-3.0,), (-1.0,)), (-inf,), "min", "min"
    ),
    ("aten.nansum.default", "P(sum) -> P(sum)"): Counterexample(aten.nansum.default, ((nan,), (3.0,)), (), "sum", "sum"),
    ("aten.nansum.default", "P(avg) -> P(avg)"): Counterexample(aten.nansum.default, ((nan,), (3.0,)), (), "avg", "avg"),
}
