"""Table of the elementwise reductions (sum, max, min) over ranks and over microbatches.

A new reduction begins here, under the name of `ReduceOp`, with its function of two tensors; docs/changes.md has the list of places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

REDUCTIONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
"""Name, as in types -> the function of two tensors, which takes `out=`.

torch.distributed's `ReduceOp` has the same names in capitals."""


def as_integer(value: float, dtype: torch.dtype) -> int:
    """A neutral element as an integer or bool of `dtype`: the lowest for minus infinity, the highest for infinity."""
    if value not in (float("-inf"), float("inf")):
        return int(value)
    if dtype == torch.bool:
        return int(value > 0)
    limits = torch.iinfo(dtype)
    return limits.min if value < 0 else limits.max
