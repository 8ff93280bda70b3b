"""Replacement of grouped matrix products that a model calls by meshc's operator, for any floating-point dtype, in traces and the reference.

    torch._grouped_mm(rows [r, k], matrices [g, k, n], offs=ends [g])         meshc::grouped_mm(rows, matrices, ends)
    torch.nn.functional.grouped_mm(..)                                        likewise

torch computes them in float32 on a CPU, accepts only bfloat16 on fake tensors, and has no float64 version, in which programs are verified.
Calls of another form go to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor

from meshc.ops.grouped_mm import grouped_mm as in_runs
from meshc.ops.grouped_mm import is_plain
from meshc.replacements import replace_targets

Own: TypeAlias = Callable[..., Tensor]
Given: TypeAlias = Tensor | None


@contextmanager
def grouped_calls() -> Iterator[None]:
    """A context in which both of torch's functions call meshc's operator."""
    whole, functional = _of_torch(torch._grouped_mm), _of_functional(torch.nn.functional.grouped_mm)
    with replace_targets(grouped_product=whole, functional_grouped_product=functional):
        yield


def _of_torch(own: Own) -> Own:
    def _grouped_mm(input: Tensor, mat2: Tensor, offs: Given = None, bias: Given = None, out_dtype: torch.dtype | None = None) -> Tensor:
        return _product(own, input, mat2, offs, bias, out_dtype)

    return _grouped_mm


def _of_functional(own: Own) -> Own:
    def grouped_mm(mat_a: Tensor, mat_b: Tensor, *, offs: Given = None, bias: Given = None, out_dtype: torch.dtype | None = None) -> Tensor:
        return _product(own, mat_a, mat_b, offs, bias, out_dtype)

    return grouped_mm


def _product(own: Own, a: Tensor, b: Tensor, offs: Given, bias: Given, out_dtype: torch.dtype | None) -> Tensor:
    if offs is not None and is_plain(a, b, bias, out_dtype):
        return in_runs(a, b, offs)
    return own(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
