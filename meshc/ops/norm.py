"""`meshc::square_sum`: the sum of squares of a gradient, the part of a global norm that adds up over tensors, shards and stages."""

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


