"""Products of runs that a model calls for itself, while it is traced and while it is the reference: of whatever floating-point type.

    torch._grouped_mm(rows [r, k], matrices [g, k, n], offs=ends [g])         meshc::grouped_mm(rows, matrices, ends)
    torch.nn.functional.grouped_mm(..)                                        likewise

torch computes them in float32 on a CPU, and takes no more than bfloat16 where a call has no values, as in a trace; in float64, in which
programs are verified, it has none. Calls of another form go torch's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshc.ops.grouped import grouped_mm, is_plain


@contextmanager
def grouped_calls() -> Iterator[None]:
    """Inside, both of torch's functions are the operator."""
    with _standing(torch, "_grouped_mm"), _standing(torch.nn.functional, "grouped_mm"):
        yield


def _standing(module: Any, name: str) -> Any:
    own = getattr(module, name, None)
    return nullcontext() if own is None else mock.patch.object(module, name, _of_runs(own))


def _of_runs(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def grouped(
        mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if offs is not None and is_plain(mat_a, mat_b, bias, out_dtype):
            return grouped_mm(mat_a, mat_b, offs)
        return own(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)

    return grouped
