"""Decompositions of fake-quantise operators into multiplications, roundings and clamps, since torch has no shapes or rules for them.

    out, mask = fake_quantize_per_tensor_affine_cachemask(x, scale, zero, low, high)
  becomes
    level = int(round(x * (1 / scale)) + zero);   out = (clamp(level, low, high) - zero) * scale;   mask = low <= level <= high

Bit-identical with torch's CPU kernels: scales and their reciprocals are float32, levels of a per-tensor scale are float32 too, per-channel
levels are int64 (with the same results for infinities and NaN). A fractional zero point of a channel is added before the level is rounded.
"""

from __future__ import annotations

from typing import Final

import numpy
import torch
from torch import Tensor

from meshc.ir.functions import Function

aten = torch.ops.aten
Number = float | Tensor


def per_tensor(x: Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
    """(fake-quantised x, mask of levels within the range)"""
    return _quantize(x, *_single(scale), zero_point, quant_min, quant_max, torch.float32)


def per_tensor_read(
    x: Tensor, scale: Tensor, zero_point: Tensor, fake_quant_enabled: Tensor, quant_min: int, quant_max: int
) -> tuple[Tensor, Tensor]:
    """The same with scale and zero point as tensors of one number, and a flag that turns quantisation off."""
    out, mask = _quantize(x, *_reciprocal(scale.reshape(())), zero_point.reshape(()), quant_min, quant_max, torch.float32)
    enabled = fake_quant_enabled.reshape(()) != 0
    return torch.where(enabled, out, x), mask | ~enabled


def per_channel(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int) -> tuple[Tensor, Tensor]:
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
    dx, dscale, dzero = _backward(grad, x, scale.reshape(()), zero, quant_min, quant_max, grad_factor)
    return dx, dscale.sum().reshape(scale.shape), dzero.sum().reshape(zero_point.shape)


def learnable_per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> Tensor:
    return per_channel(x, scale, zero_point.round().clamp(quant_min, quant_max), axis, quant_min, quant_max)[0]


def learnable_per_channel_backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, quant_min: int, quant_max: int, grad_factor: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, scale and zero point."""
    shape = [-1 if d == axis % x.dim() else 1 for d in range(x.dim())]
    zero = zero_point.round().clamp(quant_min, quant_max).reshape(shape)
    dx, dscale, dzero = _backward(grad, x, scale.reshape(shape), zero, quant_min, quant_max, grad_factor)
    others = [d for d in range(x.dim()) if d != axis % x.dim()]
    if others:
        dscale, dzero = dscale.sum(others), dzero.sum(others)
    return dx, dscale, dzero


def _single(scale: float) -> tuple[float, float]:
    """A number and its reciprocal, in single precision."""
    return float(numpy.float32(scale)), float(numpy.float32(1.0) / numpy.float32(scale))


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


def _backward(
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


DECOMPOSITIONS: Final[dict[object, Function]] = {
    aten.fake_quantize_per_tensor_affine_cachemask.default: per_tensor,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: per_tensor_read,
    aten.fake_quantize_per_channel_affine_cachemask.default: per_channel,
    aten._fake_quantize_learnable_per_tensor_affine.default: learnable_per_tensor,
    aten._fake_quantize_learnable_per_tensor_affine_backward.default: learnable_per_tensor_backward,
    aten._fake_quantize_learnable_per_channel_affine.default: learnable_per_channel,
    aten._fake_quantize_learnable_per_channel_affine_backward.default: learnable_per_channel_backward,
}
