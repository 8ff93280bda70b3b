"""Operators of gradients in fewer bits: elements under a scale for each block of 256 of a row, and signs, eight in a byte.

    peak = meshc.block_scale(value, global_shape, local_shape, offsets, last)         the largest magnitude of each block (`block_codes.py`)
    q = meshc.quantize_blocks(value, peak, "int8", global_shape, local_shape, offsets, last)      value * (127 / peak), to the nearest
    value = meshc.dequantize_blocks(q, peak, "int8", float32, global_shape, local_shape, offsets, last)      q * (peak / 127)

    q = meshc.pack_signs(value)                  [.., 8] -> [..] uint8: bit i is set where value[.., i] is not negative
    value = meshc.unpack_signs(q, scale)         [..] -> [.., 8]: the scale, or its negative
    value = meshc.between_stages(value, "int8", 1)      rounded, and its gradient likewise, until a pass writes the three above in its place

Blocks are counted on global indices, so that a scale and what it scales are the same on every mesh. A block with an element that is not
finite comes back as NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshc.ir.formats import ELEMENTS
from meshc.ops.block_codes import _TILE, BLOCK, _blocks, _fit_tile
from meshc.ops.definition import misfit, operator, ops, register_kernel

Shape = Sequence[int]
BITS = 8
"""Signs in a byte."""


def _arithmetic_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fit_blocks(
    name: str, value: Tensor, peak: Tensor, element: str, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int
) -> None:
    _fit_tile(name, value, global_shape, local_shape, offsets, last)
    columns = 1
    for size in global_shape[len(global_shape) - last :]:
        columns *= size
    if element not in ELEMENTS or peak.dtype != torch.float32 or tuple(peak.shape) != (*value.shape[:-1], -(-columns // BLOCK)):
        raise misfit(name, f"a float32 peak for each row and block of {BLOCK}, and one of {', '.join(ELEMENTS)}", value=value, peak=peak)


def _quantize_fake(value: Tensor, peak: Tensor, element: str, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int) -> Tensor:
    _fit_blocks("quantize_blocks", value, peak, element, global_shape, local_shape, offsets, last)
    if not value.is_floating_point():
        raise misfit("quantize_blocks", "a floating value", value=value)
    return torch.empty(value.shape, dtype=ELEMENTS[element].dtype, device=value.device)


def _quantize_blocks(
    value: Tensor, peak: Tensor, element: str, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int
) -> Tensor:
    _quantize_fake(value, peak, element, global_shape, local_shape, offsets, last)
    to, of = ELEMENTS[element], _blocks(value, peak, global_shape, local_shape, offsets, last)
    largest = peak.to(_arithmetic_dtype(value)).index_select(-1, of)
    scaled = torch.where(largest > 0, value * (to.largest / largest), 0.0).nan_to_num_(0.0).clamp_(-to.largest, to.largest)
    return (scaled.round() if element == "int8" else scaled).to(to.dtype)


def _dequantize_fake(
    q: Tensor, peak: Tensor, element: str, dtype: torch.dtype, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int
) -> Tensor:
    _fit_blocks("dequantize_blocks", q, peak, element, global_shape, local_shape, offsets, last)
    if q.dtype != ELEMENTS[element].dtype or not dtype.is_floating_point:
        raise misfit("dequantize_blocks", f"elements of {element}, to a floating dtype", q=q)
    return torch.empty(q.shape, dtype=dtype, device=q.device)


def _dequantize_blocks(
    q: Tensor, peak: Tensor, element: str, dtype: torch.dtype, global_shape: Shape, local_shape: Shape, offsets: Shape, last: int
) -> Tensor:
    _dequantize_fake(q, peak, element, dtype, global_shape, local_shape, offsets, last)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    step = (peak.to(computed) / ELEMENTS[element].largest).index_select(-1, _blocks(q, peak, global_shape, local_shape, offsets, last))
    step = torch.where(torch.isfinite(step), step, torch.nan)
    return (q.to(computed) * step).to(dtype)


register_kernel(f"quantize_blocks(Tensor value, Tensor peak, str element, {_TILE}) -> Tensor", _quantize_blocks, _quantize_fake)
_DEQUANTIZED = f"dequantize_blocks(Tensor q, Tensor peak, str element, ScalarType dtype, {_TILE}) -> Tensor"
register_kernel(_DEQUANTIZED, _dequantize_blocks, _dequantize_fake)


def _check_crossing(x: Tensor, element: str) -> None:
    if not x.is_floating_point() or x.dim() < 1 or element not in ELEMENTS:
        raise misfit("between_stages", f"floating values of a dim or more, and one of {', '.join(ELEMENTS)}", x=x)


@operator("between_stages", "x", _check_crossing, gradient=lambda grad, element, stage: ops.between_stages(grad, element, stage))
def between_stages(x: Tensor, element: str, stage: int) -> Tensor:
    """x as `stage` of a pipeline has it: rounded in blocks of a row. Its gradient is rounded alike on its way back from there."""
    shape = [*x.shape]
    tile = (shape, shape, [0] * len(shape), 1)
    peak = ops.block_scale(x, *tile)
    made: Tensor = ops.dequantize_blocks(ops.quantize_blocks(x, peak, element, *tile), peak, element, x.dtype, *tile)
    return made


def _check_packed(value: Tensor) -> None:
    if value.dim() < 1 or value.shape[-1] != BITS or not value.is_floating_point():
        raise misfit("pack_signs", f"floating values, {BITS} along the last dim", value=value)


@operator("pack_signs", lambda value: torch.empty(value.shape[:-1], dtype=torch.uint8, device=value.device), _check_packed)
def pack_signs(value: Tensor) -> Tensor:
    """uint8, of value's shape without its last dim of 8: bit i is set where element i is not negative."""
    weights = torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.uint8, device=value.device)
    return ((value >= 0).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def _check_unpacked(q: Tensor, scale: Tensor) -> None:
    fits = scale.dim() == q.dim() and all(one in (1, size) for one, size in zip(scale.shape, q.shape, strict=True))
    if q.dtype != torch.uint8 or not fits or scale.dtype not in (torch.float32, torch.float64):
        raise misfit("unpack_signs", "bytes, and a float32 or float64 scale with their size or 1 along each dim", q=q, scale=scale)


@operator("unpack_signs", lambda q, scale: scale.new_empty((*q.shape, BITS)), _check_unpacked)
def unpack_signs(q: Tensor, scale: Tensor) -> Tensor:
    """Of scale's dtype, with one more dim of 8: the scale where a bit is set, else its negative."""
    weights = torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.uint8, device=q.device)
    each = scale.unsqueeze(-1)
    return torch.where(q.unsqueeze(-1).bitwise_and(weights) != 0, each, -each)
