"""Operators of gradients, whole or in parts: `meshc::square_sum`, which adds up over tensors, shards and stages to the square of a norm,
`meshc::non_finite`, and `meshc::widen_sum`."""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator


@operator("square_sum", results=lambda x: x.new_empty((), dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype))
def square_sum(x: Tensor) -> Tensor:
    """x of any shape -> its sum of squares, a 0-dim tensor of at least float32."""
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    norm = torch.linalg.vector_norm(x, dtype=dtype)
    return norm * norm


@operator("non_finite", results=lambda x: x.new_empty((), dtype=torch.float32))
def non_finite(x: Tensor) -> Tensor:
    """x of any shape -> 1 if an element is infinite or NaN, else 0: the largest of what the parts of a split x give."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    largest = torch.linalg.vector_norm(x, torch.inf)  # of infinities and NaN these, without a copy of x
    return largest.isfinite().logical_not().to(torch.float32)


@operator("widen_sum", results=lambda x, dtype: torch.empty_like(x, dtype=dtype))
def widen_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype that has all of its values, and in which what is left of a sum over ranks is taken."""
    return x.to(dtype, copy=True)
