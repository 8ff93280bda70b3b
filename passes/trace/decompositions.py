"""Table of decompositions for AOTAutograd, of operators whose sharding rules are simpler in pieces.

    out, mean, rstd = native_group_norm(x, w, b, N, C, HxW, groups, eps)
  becomes
    centred = x - mean(x);   out = centred * rsqrt(mean(centred * centred) + eps) * w + b

Most are torch's own decompositions. Some are not: torch's variance is one operator, which a split would need twice, its group norm is
written in primitives that no program may name, and it has none for the gradient of a weight norm. A convolution's backward stays one
operator, but for the bias's gradient where it is the only one: that reads neither x nor the weight, which are not kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshc.ir.functions import Function
from meshc.passes.trace.fake_quantize import DECOMPOSITIONS as FAKE_QUANTIZE
from meshc.private import get_decompositions

aten = torch.ops.aten

DECOMPOSED = (
    # norms
    aten.native_batch_norm, aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training, aten._batch_norm_with_update_functional, aten.native_batch_norm_backward,
    aten.batch_norm_backward, aten.native_group_norm_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward, aten.renorm,
    # losses
    aten.nll_loss_forward, aten.nll_loss_backward, aten.nll_loss2d_forward, aten.nll_loss2d_backward, aten.mse_loss,
    aten.mse_loss_backward, aten.huber_loss, aten.huber_loss_backward, aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
    aten.soft_margin_loss, aten.soft_margin_loss_backward, aten.binary_cross_entropy, aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits, aten.multi_margin_loss, aten.multilabel_margin_loss_forward, aten.log_sigmoid_forward,
    # products
    aten.addcmul, aten.addmv, aten.addr, aten.linear_backward, aten.rsub, aten.dist, aten.trace,
    # draws
    aten.native_dropout_backward,
    # layouts
    aten.alias_copy, aten.expand_copy, aten.narrow_copy, aten.permute_copy, aten.split_with_sizes_copy, aten.squeeze_copy, aten.t_copy,
    aten.transpose_copy, aten.unbind_copy, aten.unsqueeze_copy, aten.view_copy, aten._chunk_cat, aten.block_diag, aten.channel_shuffle,
    aten.diag_embed, aten.pixel_shuffle, aten.pixel_unshuffle, aten.rot90,
    # positions
    aten.eye, aten.linspace, aten.logspace, aten.tril_indices, aten.triu_indices, aten.isin, aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
    # reductions
    aten.aminmax, aten._safe_softmax,
    # read for the dtype of their operand alone: these are sharded like their reader, and the operand is not kept for them
    aten.new_zeros, aten.new_ones, aten.new_full,
)  # fmt: skip
"""Operators that use torch's own decompositions."""


def var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
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


def std_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Standard deviation and mean."""
    variance, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


def native_group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(result, mean [batch, groups], 1 / standard deviation); half precision is computed in float32."""
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


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """v * g / norms, and the norms of v over all dims but `dim`, of the shape of g; those of bfloat16 are float32."""
    wide = torch.float32 if g.dtype == torch.bfloat16 else g.dtype
    norms = torch.linalg.vector_norm(v, 2, [d for d in range(v.dim()) if d != dim], keepdim=True, dtype=wide)
    return v * (g / norms.to(g.dtype)), norms


def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of v and g."""
    norms = norms.to(g.dtype)
    along = (grad * v).sum([d for d in range(v.dim()) if d != dim], True) / norms
    return (grad - v * (along / norms)) * (g / norms), along


def convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int] | None, *settings: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, weight and bias that the last of `settings` requests: decomposed for the bias alone."""
    *_, wanted = settings
    if list(wanted) != [False, False, True]:
        return NotImplemented
    return None, None, grad.sum([0, *range(2, grad.dim())])


def decompositions() -> dict[object, Function]:
    """Operator -> its decomposition."""
    table: dict[object, Function] = dict(get_decompositions(list(DECOMPOSED)).items())
    table[aten.var_mean.correction] = var_mean
    table[aten.std_mean.correction] = std_mean
    table[aten.native_group_norm.default] = native_group_norm
    table[aten.convolution_backward.default] = convolution_backward
    table[aten._weight_norm_interface.default] = weight_norm
    table[aten._weight_norm_interface_backward.default] = weight_norm_backward
    return table | FAKE_QUANTIZE
