"""`meshc::square_sum`: the sum of squares of a gradient, the part of a global norm that adds up over tensors, shards and stages."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("meshc::square_sum", mutates_args=())
def square_sum(x: Tensor) -> Tensor:
    """x of any shape -> its sum of squares, a 0-dim tensor of at least float32."""
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    norm = torch.linalg.vector_norm(x, dtype=dtype)
    return norm * norm


@square_sum.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype)
