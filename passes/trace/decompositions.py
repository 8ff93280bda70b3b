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
from math import prod
from typing import Any

import numpy
import torch
from torch import Tensor

from meshc.ir.functions import Function
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
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean as means: two passes, exact on a split dim once the means are."""
    dims = list(range(x.dim())) if dim is None or list(dim) == [] else [d % x.dim() for d in dim]
    count = prod(x.shape[d] for d in dims)
    mean = x.mean(dims, True)
    centred = x - mean
    free = max(count - (1.0 if correction is None else correction), 0.0)
    scale = count / free if free else float("inf")  # which zero makes NaN, as in torch
    variance = (centred * centred).mean(dims, True) * scale
    if not keepdim:
        variance, mean = variance.squeeze(dims), mean.squeeze(dims)
    return variance, mean


def std_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean."""
    variance, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


def native_group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, batch: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
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


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """v * g / norms, and the norms of v over all dims but `dim`, of the shape of g; those of bfloat16 are float32."""
    wide = torch.float32 if g.dtype == torch.bfloat16 else g.dtype
    norms = torch.linalg.vector_norm(v, 2, [d for d in range(v.dim()) if d != dim], keepdim=True, dtype=wide)
    return v * (g / norms.to(g.dtype)), norms


def weight_norm_backward(
    grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """The gradients of v and g."""
    norms = norms.to(g.dtype)
    along = (grad * v).sum([d for d in range(v.dim()) if d != dim], True) / norms
    return (grad - v * (along / norms)) * (g / norms), along


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, sizes: Sequence[int] | None, *settings: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias that the last of `settings` requests: decomposed for the bias alone."""
    *_, wanted = settings
    if list(wanted) != [False, False, True]:
        return NotImplemented
    return None, None, grad.sum([0, *range(2, grad.dim())])


# Fake-quantise operators as multiplications, roundings and clamps, since torch has no shapes or rules for them.
#
#     out, mask = fake_quantize_per_tensor_affine_cachemask(x, scale, zero, low, high)
#   becomes
#     level = int(round(x * (1 / scale)) + zero);   out = (clamp(level, low, high) - zero) * scale;   mask = low <= level <= high
#
# Bit-identical with torch's CPU kernels: scales and their reciprocals are float32, levels of a per-tensor scale are float32 too, those of
# channels are int64 (with the same results for infinities and NaN). A fractional zero point of a channel is added before the level is
# rounded.


Number = float | Tensor


def quantize_per_tensor(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """(fake-quantised x, mask of levels within the range)"""
    single = numpy.float32(scale)
    return _quantize(x, float(single), float(numpy.float32(1.0) / single), zero_point, quant_min, quant_max, torch.float32)


def quantize_per_tensor_read(
    x: Tensor, scale: Tensor, zero_point: Tensor, fake_quant_enabled: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """The same with scale and zero point as tensors of one number, and a flag that turns quantisation off."""
    out, mask = _quantize(x, *_reciprocal(scale.reshape(())), zero_point.reshape(()), quant_min, quant_max, torch.float32)
    enabled = fake_quant_enabled.reshape(()) != 0
    return torch.where(enabled, out, x), mask | ~enabled


def quantize_per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """The same with a scale and a zero point for each index along `axis`."""
    shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    return _quantize(x, *_reciprocal(scale.reshape(shape)), zero_point.reshape(shape), quant_min, quant_max, torch.int64)


def learnable_per_tensor(
    x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    """Fake-quantised x, for trained scale and zero point."""
    zero = zero_point.reshape(()).to(torch.float32).round().clamp(quant_min, quant_max)
    return _quantize(x, *_reciprocal(scale.reshape(())), zero, quant_min, quant_max, torch.float32)[0]


def learnable_per_tensor_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, scale and zero point; this kernel rounds the zero point otherwise than the forward one."""
    zero = (zero_point.reshape(()).to(torch.float32) + 0.5).clamp(quant_min, quant_max).trunc()
    dx, dscale, dzero = _quantize_backward(grad, x, scale.reshape(()), zero, quant_min, quant_max, grad_factor)
    return dx, dscale.sum().reshape(scale.shape), dzero.sum().reshape(zero_point.shape)


def learnable_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    return quantize_per_channel(x, scale, zero_point.round().clamp(quant_min, quant_max), axis, quant_min, quant_max)[0]


def learnable_per_channel_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, scale and zero point."""
    shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    zero = zero_point.round().clamp(quant_min, quant_max).reshape(shape)
    dx, dscale, dzero = _quantize_backward(grad, x, scale.reshape(shape), zero, quant_min, quant_max, grad_factor)
    others = [d for d in range(x.dim()) if d != axis % x.dim()]
    if others:
        dscale, dzero = dscale.sum(others), dzero.sum(others)
    return dx, dscale, dzero


def _reciprocal(scale: Tensor) -> tuple[Tensor, Tensor]:
    narrow = scale.to(torch.float32)
    return narrow, narrow.reciprocal()


def _quantize(
    x: Tensor, scale: Number, inverse: Number, zero: Number, quant_min: int, quant_max: int, kept: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`kept`: the kernel's dtype of levels. A fractional zero point is added before rounding."""
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    inverse = inverse.to(wide.dtype) if isinstance(inverse, Tensor) else inverse
    fraction = isinstance(zero, Tensor) and zero.is_floating_point()
    levels = ((wide * inverse + zero).round() if fraction else (wide * inverse).round() + zero).to(kept)
    clamped = (levels.nan_to_num(float(quant_min)) if kept.is_floating_point else levels).clamp(quant_min, quant_max)
    precise = not kept.is_floating_point and (fraction or x.dtype == torch.float64)
    out = (clamped.to(torch.float64 if precise else torch.float32) - zero) * scale
    return out.to(x.dtype), (levels >= quant_min) & (levels <= quant_max)


def _quantize_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero: Tensor, quant_min: int, quant_max: int, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per element: the gradient of x, and the summands of the gradients of scale and zero point."""
    narrow, inverse = _reciprocal(scale)
    levels = (x * inverse).round() + zero
    clamped = levels.clamp(quant_min, quant_max)
    inside = levels == clamped
    kept = (clamped - zero) * narrow
    dscale = torch.where(inside, (kept - x) * inverse, clamped - zero)
    dzero = torch.where(inside, 0.0, -narrow)
    return grad * inside, grad * dscale * factor, grad * dzero * factor


def decompositions() -> dict[object, Function]:
    """Operator -> its decomposition."""
    table: dict[object, Function] = dict(get_decompositions(list(DECOMPOSED)).items())
    return table | {
        aten.var_mean.correction: var_mean,
        aten.std_mean.correction: std_mean,
        aten.native_group_norm.default: native_group_norm,
        aten.convolution_backward.default: convolution_backward,
        aten._weight_norm_interface.default: weight_norm,
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        aten.fake_quantize_per_tensor_affine_cachemask.default: quantize_per_tensor,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: quantize_per_tensor_read,
        aten.fake_quantize_per_channel_affine_cachemask.default: quantize_per_channel,
        aten._fake_quantize_learnable_per_tensor_affine.default: learnable_per_tensor,
        aten._fake_quantize_learnable_per_tensor_affine_backward.default: learnable_per_tensor_backward,
        aten._fake_quantize_learnable_per_channel_affine.default: learnable_per_channel,
        aten._fake_quantize_learnable_per_channel_affine_backward.default: learnable_per_channel_backward,
    }
