"""Table of the elementwise reductions (sum, max, min) over ranks and over microbatches: a record each, under the name of `ReduceOp`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

import torch

from meshc.ir.keys import AccumulationKind, Kind


@dataclass(frozen=True)
class Reduction:
    """combine      the function of two parts, which takes `out=`
    neutral      the number that changes no other (`as_integer` has it for integers and bools)
    idempotent   whether equal parts come to what each of them is
    instruction  what accumulates parts of microbatches
    part, whole  the kinds of keys of these parts, and of what they come to
    inverse      the function of a whole and one part that gives the other; None for an extreme
    opposite     of an extreme, the reduction that it becomes past an operator that falls; "" for others. An extreme takes bools, and no
                 complex numbers, which have no order
    """

    combine: Callable[..., torch.Tensor]
    neutral: float
    idempotent: bool
    instruction: str
    part: Kind
    whole: Kind
    inverse: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    opposite: str = ""

    def keeps(self, value: float) -> bool:
        """Whether `value` is what it comes to where all parts hold it."""
        return self.idempotent or value == self.neutral


REDUCTIONS: Final[Mapping[str, Reduction]] = {
    "sum": Reduction(torch.add, 0.0, False, "add", "part", "sum", inverse=torch.sub),
    "max": Reduction(torch.maximum, -inf, True, "max", AccumulationKind("high"), AccumulationKind("largest"), opposite="min"),
    "min": Reduction(torch.minimum, inf, True, "min", AccumulationKind("low"), AccumulationKind("smallest"), opposite="max"),
}
"""Name, as in types -> record. torch.distributed's `ReduceOp` has the same names in capitals."""


def as_integer(value: float, dtype: torch.dtype) -> int:
    """A neutral element as an integer or bool of `dtype`: the lowest for minus infinity, the highest for infinity."""
    if value not in (-inf, inf):
        return int(value)
    if dtype == torch.bool:
        return int(value > 0)
    limits = torch.iinfo(dtype)
    return limits.min if value < 0 else limits.max
