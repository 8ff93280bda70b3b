"""Operators of products in few bits: scales, values rounded to an element type under them, and products of such values.

    scale = meshc.scale_of(x [.., k], [1], "e4m3", "")              float32: what brings the largest magnitude along the dims to 448
    q = meshc.quantize(x, scale, "e4m3")                            x * scale, clamped to the largest, and rounded to nearest
    y = meshc.scaled_mm(q, r, scale, scale_r, bfloat16)             (q / scale) @ (r / scale_r), summed in float32
    q = meshc.quantize_by_draw(x, scale, "e4m3", seed_step, name, global_shape, local_shape, offsets)     up or down, by a draw
    x = meshc.dequantize(q, scale, bfloat16)                        q / scale
    scale = meshc.scale_in_units(scale, unit)                       whose inverse is an e4m3 number times the inverse of the unit
    scale = meshc.scale_of_history(peaks [16], 2, "e4m3")           by the largest magnitudes of the steps before; next to it
    peaks = meshc.next_history(peaks, meshc.peak_of(x, [0, 1]))     with that of x in front, without the last

In padding a scale may be anything: a zero is rounded to zero whatever the scale, and the inverse of a scale of 0 counts as 0, so that
what is padded adds nothing to a sum.

Operands that come in float64 are computed in float64, but for scales. Whatever kernel runs, operands are the same bit for bit; the sums may
be in another order. (What is computed in which dtype is as in torchao/float8/float8_utils.py, so that its models have equal operands.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from meshc.ir.formats import ELEMENTS
from meshc.ops import philox
from meshc.ops.definition import misfit, operator
from meshc.ops.state_rounding import call_named
from meshc.ops.tile import tile_of

LEAST = 1e-12
"""Magnitude below which a scale grows no further: zeros have a finite scale."""
KERNEL_BLOCK = 128
"""Elements under one scale of the kernel for blocks."""
KERNEL_MULTIPLE = 16
"""Sizes of which torch's scaled products take multiples only."""


def _scale_shape(x: Tensor, dims: list[int]) -> Tensor:
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _check_element(element: str, x: Tensor) -> None:
    if element not in ELEMENTS or not x.is_floating_point():
        raise misfit("quantize", f"floating-point values are rounded to one of {', '.join(ELEMENTS)}, not to {element!r}", x=x)


def _check_dims(x: Tensor, dims: list[int], element: str, rounded: str) -> None:
    _check_element(element, x)
    if not all(0 <= dim < x.dim() for dim in dims) or rounded not in ("", "down", "ocp"):
        raise misfit("scale_of", f"dims {dims} are x's, from 0, and a scale is rounded '', 'down' or 'ocp', not {rounded!r}", x=x)


@operator("scale_of", _scale_shape, _check_dims)
def scale_of(x: Tensor, dims: list[int], element: str, rounded: str) -> Tensor:
    """float32, of x's shape with 1 along `dims`: the largest of the element type by the largest magnitude along these."""
    peak = x.abs().amax(dims, keepdim=True) if dims and x.numel() else x.abs() if x.numel() else x.new_zeros(_scale_shape(x, dims).shape)
    scale = (ELEMENTS[element].largest / peak.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
    if rounded == "down":
        return torch.exp2(torch.floor(torch.log2(scale)))
    if rounded == "ocp":
        top = torch.frexp(torch.tensor(ELEMENTS[element].largest)).exponent
        return torch.ldexp(torch.ones_like(scale), top - torch.frexp(peak.to(torch.float32).clamp(min=LEAST)).exponent)
    return scale


def _check_peak(x: Tensor, dims: list[int]) -> None:
    if not x.is_floating_point() or not all(0 <= dim < x.dim() for dim in dims):
        raise misfit("peak_of", f"dims {dims} are those of floating-point values, from 0", x=x)


@operator("peak_of", _scale_shape, _check_peak)
def peak_of(x: Tensor, dims: list[int]) -> Tensor:
    """float32, of x's shape with 1 along `dims`: the largest magnitude along these; infinity where one is not finite."""
    if not x.numel():
        return x.new_zeros(_scale_shape(x, dims).shape, dtype=torch.float32)
    return torch.nan_to_num(x.abs().amax(dims, keepdim=True).to(torch.float32), nan=torch.inf, posinf=torch.inf)


def _check_history(history: Tensor, dims: int, element: str) -> None:
    _check_element(element, history)
    if history.dtype != torch.float32 or history.dim() != 1 or not history.numel() or dims < 0:
        raise misfit("scale_of_history", "a history is float32 [steps]", history=history)


@operator("scale_of_history", lambda history, dims: history.new_empty([1] * dims), _check_history)
def scale_of_history(history: Tensor, dims: int, element: str) -> Tensor:
    """float32 [1, ..] of so many dims: the largest of the element type by the largest of the history; 1 while that is zero."""
    peak = history.amax()
    scale = (ELEMENTS[element].largest / peak.to(torch.float64).clamp(min=LEAST)).to(torch.float32)
    return torch.where(peak == 0, 1.0, scale).reshape([1] * dims)


def _check_next(history: Tensor, peak: Tensor) -> None:
    if history.dtype != torch.float32 or history.dim() != 1 or not history.numel() or peak.dtype != torch.float32 or peak.numel() != 1:
        raise misfit("next_history", "a history is float32 [steps], a peak one float32 number", history=history, peak=peak)


@operator("next_history", "history", _check_next)
def next_history(history: Tensor, peak: Tensor) -> Tensor:
    """Of history's shape: the peak in front, as zero where it is not finite, and the history without its last step."""
    first = torch.where(peak.isfinite(), peak, 0.0).reshape(1)
    return torch.cat([first, history[:-1]])


def _check_scale(x: Tensor, scale: Tensor, element: str) -> None:
    _check_element(element, x)
    if scale.dtype != torch.float32 or scale.dim() != x.dim() or any(s not in (1, n) for s, n in zip(scale.shape, x.shape, strict=True)):
        raise misfit("quantize", "a scale is float32, with x's size or 1 along each dim", x=x, scale=scale)


@operator("quantize", results=lambda x, element: torch.empty_like(x, dtype=ELEMENTS[element].dtype), fit=_check_scale)
def quantize(x: Tensor, scale: Tensor, element: str) -> Tensor:
    """Of x's shape: x * scale, clamped and rounded to the nearest of the element type, of two to the even one."""
    to, computed = ELEMENTS[element], _arithmetic_dtype(x)
    scaled = torch.where(x == 0, 0.0, x.to(computed) * scale).clamp(-to.largest, to.largest)
    if element == "int8":
        return scaled.round().to(torch.int8)
    return (_round_e2m1(scaled) if element == "e2m1" else scaled).to(to.dtype)


def _round_e2m1(x: Tensor) -> Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, of two to that with an even last bit."""
    step = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=1.0)))) / 2
    return (x / step).round() * step


_PARTS: Final = {"e4m3": (3, -6), "e5m2": (2, -14), "e2m1": (1, 0), "int8": (0, 0)}
"""Of element types, bits behind the leading one, and the exponent of the smallest numbers with one; integers are a step apart."""


def _check_drawn(
    x: Tensor, scale: Tensor, element: str, seed_step: Tensor, global_shape: Sequence[int], local_shape: Sequence[int],
    offsets: Sequence[int],
) -> None:  # fmt: skip
    _check_scale(x, scale, element)
    fits = len(global_shape) == len(local_shape) == len(offsets) and prod(local_shape) == x.numel()
    if element not in _PARTS or not fits or seed_step.dtype != torch.int64 or seed_step.shape != (2,) or seed_step.device != x.device:
        rule = "seed_step is int64 [2], where x is, and the tile has as many elements as x"
        raise misfit("quantize_by_draw", rule, x=x, seed_step=seed_step)


@operator(
    "quantize_by_draw", lambda x, element: torch.empty_like(x, dtype=ELEMENTS[element].dtype), _check_drawn,
    schema="(Tensor x, Tensor scale, str element, Tensor seed_step, str name, SymInt[] global_shape, SymInt[] local_shape, "
    "SymInt[] offsets) -> Tensor",
)  # fmt: skip
def quantize_by_draw(
    x: Tensor, scale: Tensor, element: str, seed_step: Tensor, name: str, global_shape: Sequence[int], local_shape: Sequence[int],
    offsets: Sequence[int],
) -> Tensor:  # fmt: skip
    """Of x's shape: x * scale, clamped, rounded to the upper of its two neighbours where its distance from the lower, in units of that of
    the two, is more than the draw for its element, a float32 uniform of the call of this name (docs/randomness.md)."""
    to, computed = ELEMENTS[element], _arithmetic_dtype(x)
    scaled = torch.where(x == 0, 0.0, x.to(computed) * scale).clamp(-to.largest, to.largest)
    drawn = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    philox.draw("uniform32", tile_of(global_shape, local_shape, offsets), drawn, seed_step=seed_step, call=call_named(name))
    bits, least = _PARTS[element]
    exponent = (torch.frexp(scaled).exponent - 1).clamp(min=least) if element != "int8" else torch.zeros_like(scaled, dtype=torch.int32)
    step = torch.ldexp(torch.ones_like(scaled), exponent - bits)
    lower = torch.floor(scaled / step)
    return ((lower + (scaled / step - lower > drawn)) * step).to(to.dtype)


def _arithmetic_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check_quantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    if scale.dim() != x.dim() or any(s not in (1, n) for s, n in zip(scale.shape, x.shape, strict=True)) or not dtype.is_floating_point:
        raise misfit("dequantize", "a scale has x's size or 1 along each dim, and the result is floating-point", x=x, scale=scale)


@operator("dequantize", results=lambda x, dtype: torch.empty_like(x, dtype=dtype), fit=_check_quantized)
def dequantize(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Of x's shape: x times the inverse of the scale in float32, in `dtype`."""
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    return (x.to(computed) * inverse(scale)).to(dtype)


def inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, scale.reciprocal())


def _check_units(scale: Tensor, unit: Tensor) -> None:
    if scale.dtype != torch.float32 or unit.dtype != torch.float32 or unit.numel() != 1 or unit.dim() != scale.dim():
        raise misfit("scale_in_units", "scales are float32, the unit is one number of as many dims", scale=scale, unit=unit)


@operator("scale_in_units", "scale", _check_units)
def scale_in_units(scale: Tensor, unit: Tensor) -> Tensor:
    """Of scale's shape: scales of blocks, rounded to where their inverse is e4m3 in units of `unit`'s inverse by 448, at least 2^-9 of it
    (torchao/prototype/mx_formats/nvfp4_tensor.py)."""
    step = inverse(unit) / ELEMENTS["e4m3"].largest
    found = (inverse(scale) * torch.where(step == 0, 0.0, step.reciprocal())).to(torch.float8_e4m3fn).to(torch.float32)
    return torch.where(scale == 0, 0.0, (found.clamp(min=2.0**-9) * step).reciprocal())


def _product_sizes(a: Tensor, b: Tensor, summed: int, batch: int) -> list[int]:
    return [*a.shape[: a.dim() - summed], *b.shape[batch + summed :]]


def _check_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, summed: int, batch: int) -> None:
    _check_quantized(a, scale_a, dtype)
    _check_quantized(b, scale_b, dtype)
    fits = batch in (0, 1) and summed in (1, 2) and a.dim() == batch + 1 + summed and b.dim() > batch + summed
    if not fits or a.shape[:batch] != b.shape[:batch] or a.shape[batch + 1 :] != b.shape[batch : batch + summed]:
        raise misfit("scaled_mm", f"a [m, k..] meets b [k.., n..] in {summed} dims of k behind {batch} of a batch", a=a, b=b)


@operator(
    "scaled_mm", results=lambda a, b, dtype, summed, batch: a.new_empty(_product_sizes(a, b, summed, batch), dtype=dtype),
    fit=_check_product,
)  # fmt: skip
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, summed: int = 1, batch: int = 0
) -> Tensor:
    """[batch.., m, n..] of a [batch.., m, k..] and b [batch.., k.., n..], in blocks where k or n has two dims: the sum over all of k of
    (a / scale_a) * (b / scale_b), in float32 (float64 for a result in it), rounded to `dtype`."""
    if has_kernel(a, b, scale_a, scale_b, dtype, summed, batch):
        scales = inverse(scale_a), inverse(scale_b)
        if summed == 1:
            return run_kernel(a, b, *scales, dtype)
        return run_block_kernel(a, b, *scales, dtype).reshape(_product_sizes(a, b, summed, batch))
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    rows, columns = a.to(computed) * inverse(scale_a), b.to(computed) * inverse(scale_b)
    k = prod(a.shape[batch + 1 :])
    lead = list(a.shape[: batch + 1])
    made = torch.matmul(rows.reshape(*lead, k), columns.reshape(*a.shape[:batch], k, prod(b.shape[batch + summed :])))
    return made.reshape(_product_sizes(a, b, summed, batch)).to(dtype)


class _Tensorlike(Protocol):
    """A tensor, or the record of one."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype | None: ...


def why_no_kernel(
    a: _Tensorlike, b: _Tensorlike, scale_a: _Tensorlike, scale_b: _Tensorlike, dtype: torch.dtype, summed: int = 1, batch: int = 0
) -> str:
    """Why torch has no kernel on any device for a product of scaled values in 8 bits; "" if it has one: of one scale each, or of one for
    each row of a and column of b, or for each 128 of these or 128 x 128 of b, with a result in bfloat16."""
    if a.dtype == torch.int8:
        return "torch has no kernel for int8 with scales"
    if batch:
        return "torch has no kernel for a batch of products"
    if a.dtype == b.dtype == torch.float8_e5m2:
        return "there is no kernel for two operands of e5m2"
    of_tensors = prod(scale_a.shape) == prod(scale_b.shape) == 1
    if summed > 1:
        columns = prod(b.shape[2:])
        if {*a.shape[2:], *b.shape[1::2]} != {KERNEL_BLOCK} or a.dtype != torch.float8_e4m3fn or b.dtype != torch.float8_e4m3fn:
            return f"no kernel for scales of other blocks than {KERNEL_BLOCK} of e4m3 is used"
        if a.shape[0] % KERNEL_MULTIPLE or columns % KERNEL_MULTIPLE:
            return f"the kernel for blocks takes rows and columns in multiples of {KERNEL_MULTIPLE}"
    elif not (of_tensors or (*scale_a.shape, *scale_b.shape) == (a.shape[0], 1, 1, b.shape[1])):
        return "no kernel for such scales is used"
    if dtype == torch.float64:
        return "the kernel gives no float64"
    kind = "blocks" if summed > 1 else "rows"
    return "" if of_tensors or dtype == torch.bfloat16 else f"the kernel for scales of {kind} gives bfloat16 alone"


def has_kernel(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, summed: int = 1, batch: int = 0
) -> bool:  # fmt: skip
    """Whether torch has a kernel for it on the device where it is: on CUDA, from compute capability 8.9 on; of blocks, 9.0."""
    if not a.is_cuda or not a.numel() or not b.numel():
        return False
    found = torch.cuda.get_device_capability(a.device)
    there = found == (9, 0) if summed > 1 else found >= (8, 9)
    return there and not why_no_kernel(a, b, scale_a, scale_b, dtype, summed, batch)


def run_kernel(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, bias: Tensor | None = None,
    scale_result: Tensor | None = None, fast: bool = False,
) -> Tensor:  # fmt: skip
    """(a * scale_a) @ (b * scale_b) by torch's kernel. Zeros, which add nothing, fill sizes up to the multiples that it takes."""
    inner, columns = -a.shape[1] % KERNEL_MULTIPLE, -b.shape[1] % KERNEL_MULTIPLE
    if scale_b.numel() > 1 and columns:
        scale_b = F.pad(scale_b, (0, columns))
    if bias is not None and columns:
        bias = F.pad(bias, (0, columns))
    scales = scale_a.contiguous(), scale_b.contiguous()
    made = torch._scaled_mm(
        padded_rows(a, 0, inner), padded_rows(b.t(), columns, inner).t(), *scales, bias, scale_result, dtype, use_fast_accum=fast
    )
    return made[:, : b.shape[1]].contiguous() if columns else made


def run_block_kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """[m, n] of a [m, k, 128] and b [k, 128, n] or [k, 128, n, 128], times their scales, by torch's kernel."""
    rows, columns = a.flatten(1), b.flatten(2).flatten(0, 1)
    of_rows = scale_a.flatten(1).t().contiguous().t()
    if b.dim() == 4:  # blocks of k in fours, from column to column
        kind, of_columns = ScalingType.BlockWise128x128, scale_b.reshape(b.shape[0], b.shape[2])
        of_columns = F.pad(of_columns, (0, 0, 0, -b.shape[0] % 4)).t().contiguous().t()
    else:
        kind, of_columns = ScalingType.BlockWise1x128, scale_b.reshape(b.shape[0], b.shape[2]).contiguous().t()
    rows, columns = padded_rows(rows, 0, 0), padded_rows(columns.t(), 0, 0).t()
    made: Tensor = F.scaled_mm(rows, columns, of_rows, ScalingType.BlockWise1x128, of_columns, kind, output_dtype=dtype)
    return made


def padded_rows(x: Tensor, below: int, right: int) -> Tensor:
    """x with zeros below and to the right, whose byte is 0, and with contiguous rows that kernels see as such: `contiguous` leaves one row
    whose stride is another as it is."""
    if below or right:
        return F.pad(x.contiguous().view(torch.uint8), (0, right, 0, below)).view(x.dtype)
    return x if x.stride()[-2:] == (x.shape[-1], 1) and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
