"""What AOTAutograd takes apart: operators whose rules are simpler in pieces.

    out, mean, rstd = native_group_norm(x, w, b, N, C, HxW, groups, eps)
  becomes
    centred = x - mean(x);   out = centred * rsqrt(mean(centred * centred) + eps) * w + b

Most are torch's own decompositions. Two are not: torch's variance is one operator, which a split would need twice, and its group norm is
written in primitives that no program may name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import get_decompositions

aten = torch.ops.aten

DECOMPOSED = (
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.native_group_norm_backward,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.var_mean,
    aten.addcmul,
    aten.linear_backward,
    aten.native_dropout_backward,
    aten._fused_rms_norm,
    aten._fused_rms_norm_backward,
    aten.rsub,
    aten.binary_cross_entropy_with_logits,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
)
"""Taken apart by torch's own decompositions: each a list of operators whose rules are simpler than its own would be."""

def var_mean(
    x: torch.Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean as means: two passes, exact on a split dim once the means are."""
    dims = list(range(x.dim())) if dim is None or list(dim) == [] else [d % x.dim() for d in dim]
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.mean(dims, True)
    centred = x - mean
    free = max(count - (1.0 if correction is None else correction), 0.0)
    scale = count / free if free else float("inf")  # which zero makes NaN, as in torch
    variance = (centred * centred).mean(dims, True) * scale
    if not keepdim:
        variance, mean = variance.squeeze(dims), mean.squeeze(dims)
    return variance, mean


def native_group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, mean [batch, groups], 1 / standard deviation); half precision is worked in float32."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    rows = x.reshape(batch, groups, channels // groups if groups else 0, pixels).to(wide)
    variance, mean = var_mean(rows, [2, 3], correction=0.0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    out = ((rows - mean) * rstd).reshape(x.shape)
    shape = [channels if d == 1 else 1 for d in range(x.dim())]
    if weight is not None:
        out = out * weight.reshape(shape)
    if bias is not None:
        out = out + bias.reshape(shape)
    return out.to(x.dtype), mean.reshape(batch, groups).to(x.dtype), rstd.reshape(batch, groups).to(x.dtype)


def decompositions() -> dict[Any, Any]:
    """Operator -> what it is taken apart into."""
    table = dict(get_decompositions(list(dict.fromkeys(DECOMPOSED))))
    table[aten.var_mean.correction] = var_mean
    table[aten.native_group_norm.default] = native_group_norm
    return table
