"""Operators of products of decoded values, as torch has them: 8-bit values times scales that come beside them, of any layout and size.

    y [m, n] = meshc.decoded_mm(a [m, k], b [k, n], scale_a, scale_b, bias, scale_result, bfloat16, fast)
                                                                      (a * scale_a) @ (b * scale_b) + bias: torch._scaled_mm
    y = meshc.decoded_grouped_mm(a, b, scale_a, scale_b, ends [g], bfloat16, fast)
                                                                      a product for each group: torch._scaled_grouped_mm

A scale stands for a block of values: along each dim, as many as its size is contained in theirs (all of a tensor, a row, 128 by 128).

torch's kernels take rows of a and columns of b that are contiguous, and sizes in multiples of 16. What a rank has is a tile in any layout,
so operands are copied into that layout where they are not in it, and padded with zeros, which add nothing to a sum. Where torch has no
kernel (CUDA devices before compute capability 8.9, for groups other than 9; scales of blocks; a CPU, where torch does the same),
values are decoded to float32 and multiplied so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import misfit, operator
from meshc.ops.grouped_mm import runs_of
from meshc.ops.quantize import KERNEL_MULTIPLE, has_kernel, padded_rows, run_kernel

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def decode(x: Tensor, scale: Tensor) -> Tensor:
    """float32, of x's shape: x times its scales, each of which is repeated for its block."""
    if scale.numel() == 1:
        return x.to(torch.float32) * scale.reshape(())
    for dim, (size, count) in enumerate(zip(x.shape, scale.shape, strict=True)):
        if count not in (1, size):
            scale = scale.repeat_interleave(size // count, dim)
    return x.to(torch.float32) * scale


def _covers(scale: Tensor, shape: torch.Size) -> bool:
    if scale.numel() == 1:
        return True
    return scale.dim() == len(shape) and all(count and size % count == 0 for size, count in zip(shape, scale.shape, strict=True))


def _check_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, scale_result: Tensor | None, dtype: torch.dtype
) -> None:
    if a.dtype not in EIGHT_BITS or b.dtype not in EIGHT_BITS or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise misfit("decoded_mm", "values are 8-bit floats, a [m, k] and b [k, n]", a=a, b=b)
    if {scale_a.dtype, scale_b.dtype} != {torch.float32} or not (_covers(scale_a, a.shape) and _covers(scale_b, b.shape)):
        raise misfit("decoded_mm", "scales are float32, each for equal blocks of its values", a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    if bias is not None and (bias.shape != b.shape[1:] or not bias.is_floating_point()):
        raise misfit("decoded_mm", "a bias is floating-point, of b's n columns", b=b, bias=bias)
    if not dtype.is_floating_point or (scale_result is not None and (scale_result.numel() != 1 or dtype not in EIGHT_BITS)):
        raise misfit("decoded_mm", f"a result is floating-point, and has a scale in 8 bits only, not in {dtype}", scale_result=scale_result)


@operator("decoded_mm", results=lambda a, b, dtype: a.new_empty((a.shape[0], b.shape[1]), dtype=dtype), fit=_check_mm)
def decoded_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, scale_result: Tensor | None, dtype: torch.dtype,
    fast: bool,
) -> Tensor:  # fmt: skip
    """[m, n], rounded to `dtype` once, after the bias. `fast`: CUDA kernels may add up in fewer bits than float32."""
    if has_kernel(a, b, scale_a, scale_b, dtype):
        return run_kernel(a, b, scale_a, scale_b, dtype, bias, scale_result, fast)
    made = decode(a, scale_a) @ decode(b, scale_b)
    return (made if bias is None else made + bias.to(torch.float32)).to(dtype)  # torch's CPU kernel reads no scale of a result, either


def _grouped_sizes(a: Tensor, b: Tensor, ends: Tensor | None) -> list[int]:
    lead = [] if a.dim() + b.dim() == 5 else [a.shape[0] if ends is None else ends.shape[0]]
    return [*lead, a.shape[-2], b.shape[-1]]


def _check_grouped(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor | None, dtype: torch.dtype) -> None:
    dims = a.dim(), b.dim()
    if a.dtype not in EIGHT_BITS or b.dtype not in EIGHT_BITS or not set(dims) <= {2, 3} or a.shape[-1] != b.shape[-2]:
        raise misfit("decoded_grouped_mm", "values are 8-bit floats, a [.., m, k] and b [.., k, n], each with groups or in runs", a=a, b=b)
    if (ends is None) != (dims == (3, 3)) or ends is not None and (ends.dim() != 1 or ends.dtype != torch.int32 or not ends.numel()):
        raise misfit("decoded_grouped_mm", "runs have int32 ends, of groups there are none", a=a, b=b, ends=ends)
    groups = {x.shape[0] for x in (a, b) if x.dim() == 3} | ({ends.shape[0]} if ends is not None else set())
    count = next(iter(groups))
    each = count if dims == (2, 2) else 1
    wanted = [[*x.shape[:-2], each * x.shape[dim]] for x, dim in ((a, -2), (b, -1))]
    given = [[*scale.shape] for scale in (scale_a, scale_b)]
    if len(groups) != 1 or given != wanted or {scale_a.dtype, scale_b.dtype} != {torch.float32} or not dtype.is_floating_point:
        raise misfit(
            "decoded_grouped_mm", "scales are float32, one for each row of a and each column of b in each group",
            a=a, b=b, scale_a=scale_a, scale_b=scale_b, ends=ends,
        )  # fmt: skip


@operator(
    "decoded_grouped_mm", results=lambda a, b, ends, dtype: a.new_empty(_grouped_sizes(a, b, ends), dtype=dtype), fit=_check_grouped
)
def decoded_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """[m, n] of a [m, k] in runs of rows and b [g, k, n], or of a [g, m, k] and b [k, n] in runs of columns; [g, m, n] of a [m, k] and
    b [k, n] in runs of k, or of groups both. What is in no run gives zeros."""
    if ends is not None:
        ends = ends.clamp(0, _run_size(a, b)).cummax(0).values.int()  # no kernel checks them
    if a.is_cuda and a.dtype == b.dtype == EIGHT_BITS[0] and dtype == torch.bfloat16 and a.numel() and b.numel() and _is_hopper(a.device):
        return _grouped_by_torch(a, b, scale_a, scale_b, ends, fast)
    made = torch.zeros(_grouped_sizes(a, b, ends), dtype=torch.float32, device=a.device)
    parts = [(group, slice(None)) for group in range(a.shape[0])] if ends is None else runs_of(ends)
    for group, run in parts:
        if a.dim() == b.dim() == 2:
            of_a, of_b = scale_a.reshape(-1, a.shape[0])[group], scale_b.reshape(-1, b.shape[1])[group]
            made[group] = decode(a[:, run], of_a.unsqueeze(1)) @ decode(b[run], of_b.unsqueeze(0))
        elif a.dim() == 2:
            made[run] = decode(a[run], scale_a[run].unsqueeze(1)) @ decode(b[group], scale_b[group].unsqueeze(0))
        elif b.dim() == 2:
            made[:, run] = decode(a[group], scale_a[group].unsqueeze(1)) @ decode(b[:, run], scale_b[run].unsqueeze(0))
        else:
            made[group] = decode(a[group], scale_a[group].unsqueeze(1)) @ decode(b[group], scale_b[group].unsqueeze(0))
    return made.to(dtype)


def _run_size(a: Tensor, b: Tensor) -> int:
    """The size of the dim that is in runs."""
    return {(2, 3): a.shape[0], (3, 2): b.shape[-1], (2, 2): a.shape[-1]}[a.dim(), b.dim()]


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def _grouped_by_torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends: Tensor | None, fast: bool) -> Tensor:
    """The kernel's strides are those of k alone, which is padded; it leaves what is in no run as memory was."""
    inner = -a.shape[-1] % KERNEL_MULTIPLE
    rows, columns = padded_rows(a, 0, inner), padded_rows(b.transpose(-2, -1), 0, inner).transpose(-2, -1)
    scales = scale_a.contiguous(), scale_b.contiguous()
    made = torch._scaled_grouped_mm(rows, columns, *scales, ends, out_dtype=torch.bfloat16, use_fast_accum=fast).contiguous()
    if ends is None or a.dim() == b.dim() == 2:
        return made
    kept = torch.arange(_run_size(a, b), device=a.device) < ends[-1:]
    return torch.where(kept.unsqueeze(1) if a.dim() == 2 else kept, made, 0.0)
