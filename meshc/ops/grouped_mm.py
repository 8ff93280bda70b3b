"""`meshc::grouped_mm` and `grouped_outer`: products of runs of rows, each run with a matrix of its own; torch's grouped products by them.

    grouped_mm(rows [r, k], matrices [g, k, n], ends [g]) -> [r, n]       rows of run i times matrix i
    grouped_outer(left [r, k], right [r, n], ends [g]) -> [g, k, n]       of each run, the sum over its rows of left (x) right

Run i is the rows from ends[i - 1] (0 for the first) to ends[i], exclusive; ends are non-decreasing integers. Rows behind the last run give
zeros. Ends are clamped to the greatest end before and to the number of rows: no kernel trusts them. Each operator is the gradient of the
other, so that backward has one node per gradient. `routed_mm.py` has the same products for rows in any order.

Kernels: on CUDA in bfloat16 torch's grouped kernel, which requires row strides in multiples of 16 bytes: other operands are padded with
zeros. Elsewhere one product per non-empty run, which waits for `ends` on the host, as torch's own function does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.library import CustomOpDef

from meshc.ir.functions import Target
from meshc.ops.definition import operator

KERNEL_BYTES = 16
"""Alignment of rows in torch's grouped kernel, in bytes."""


def mm_of_runs(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The kernel of `grouped_mm`."""
    if _has_kernel(rows) and len(rows):
        found = torch.ops.aten._grouped_mm(_align_for_kernel(rows), _align_for_kernel(matrices), offs=_safe(ends, rows))[
            :, : matrices.shape[2]
        ]
        kept = torch.arange(rows.shape[0], device=rows.device) < _safe(ends, rows)[-1:]
        return torch.where(kept.unsqueeze(1), found, 0.0)
    out, done = rows.new_empty(rows.shape[0], matrices.shape[2]), 0
    for run, part in runs_of(ends):
        torch.mm(rows[part], matrices[run], out=out[part])
        done = part.stop
    out[done:].zero_()
    return out


grouped_mm = operator(
    "grouped_mm", "rows [r, n]", "rows [r, k], matrices:rows [g, k, n], ends:integer [g]",
    rule="rows [r, k] meet matrices [g, k, n] of their dtype, in runs that end at integers [g]",
)(mm_of_runs)  # fmt: skip


def outer_of_runs(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The kernel of `grouped_outer`."""
    if _has_kernel(left) and len(left):
        found = torch.ops.aten._grouped_mm(_align_for_kernel(left).t(), _align_for_kernel(right), offs=_safe(ends, left))
        return found[:, : left.shape[1], : right.shape[1]].contiguous()
    out, without = left.new_empty(ends.shape[0], left.shape[1], right.shape[1]), set(range(ends.shape[0]))
    for run, part in runs_of(ends):
        torch.mm(left[part].t(), right[part], out=out[run])
        without.remove(run)
    for run in without:
        out[run].zero_()
    return out


grouped_outer = operator(
    "grouped_outer", "left [g, k, n]", "left [r, k], right:left [r, n], ends:integer [g]",
    rule="left [r, k] and right [r, n] have as many rows and one dtype, in runs that end at integers [g]",
)(outer_of_runs)  # fmt: skip


def _safe(ends: Tensor, rows: Tensor) -> Tensor:
    """`ends` made non-decreasing and at most the number of rows, for torch's grouped kernel, which does not check them."""
    return ends.clamp(0, rows.shape[0]).cummax(0).values.int()


def runs_of(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """(index, rows) of the non-empty runs."""
    start = 0
    for run, end in enumerate(ends.tolist()):
        if end > start:
            yield run, slice(start, end)
            start = end


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)


def _align_for_kernel(x: Tensor) -> Tensor:
    """`x` with one of the last two dims contiguous, padded with zeros to multiples of `KERNEL_BYTES`."""
    unit = KERNEL_BYTES // x.itemsize
    last, other = -x.shape[-1] % unit, -x.shape[-2] % unit if x.dim() == 3 else 0
    if last or other:
        return torch.nn.functional.pad(x, (0, last, 0, other))
    dense = x.stride(-1) == 1 or x.dim() == 3 and x.stride(-2) == 1
    spaced = all(stride % unit == 0 for stride in x.stride() if stride != 1)
    return x if dense and spaced and x.data_ptr() % KERNEL_BYTES == 0 else x.clone(memory_format=torch.contiguous_format)


def differentiate_products(mm: CustomOpDef, outer: CustomOpDef) -> None:
    """Registers the gradients of `mm(rows, matrices, runs, ...)` and of `outer(left, right, runs, ...)`, by each other."""
    names = {op: [argument.name for argument in op._opoverload._schema.arguments[3:]] for op in (mm, outer)}

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*inputs[:3])
        ctx.others = inputs[3:]

    def product(op, left, right, runs, others):  # type: ignore[no-untyped-def]
        return op(left, right, runs, *(others[name] for name in names[op]))

    def mm_backward(ctx, grad):  # type: ignore[no-untyped-def]
        rows, matrices, runs = ctx.saved_tensors
        others = {"count": matrices.shape[0], **dict(zip(names[mm], ctx.others, strict=True))}
        # the sum first: rows are not read any more then, while what comes of the other is as large
        of_matrices = product(outer, rows, grad, runs, others) if ctx.needs_input_grad[1] else None
        of_rows = product(mm, grad, matrices.transpose(1, 2), runs, others) if ctx.needs_input_grad[0] else None
        return of_rows, of_matrices, None, *[None] * len(names[mm])

    def outer_backward(ctx, grad):  # type: ignore[no-untyped-def]
        left, right, runs = ctx.saved_tensors
        others = dict(zip(names[outer], ctx.others, strict=True))
        of_left = product(mm, right, grad.transpose(1, 2), runs, others) if ctx.needs_input_grad[0] else None
        of_right = product(mm, left, grad, runs, others) if ctx.needs_input_grad[1] else None
        return of_left, of_right, None, *[None] * len(names[outer])

    mm.register_autograd(mm_backward, setup_context=save)
    outer.register_autograd(outer_backward, setup_context=save)


differentiate_products(grouped_mm, grouped_outer)


def is_plain(rows: Tensor, matrices: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> bool:
    """Whether a call of torch's with ends is `grouped_mm` without a bias or another dtype. Other calls use torch's own function."""
    plain = bias is None and out_dtype in (None, rows.dtype) and rows.dtype == matrices.dtype
    return plain and (rows.dim(), matrices.dim()) == (2, 3)


def functional_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """As `torch.nn.functional.grouped_mm`."""
    if offs is not None and is_plain(mat_a, mat_b, bias, out_dtype):
        return grouped_mm(mat_a, mat_b, offs)
    return torch.nn.functional.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)


def torch_grouped_mm(
    input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As `torch._grouped_mm`."""
    if offs is not None and is_plain(input, mat2, bias, out_dtype):
        return grouped_mm(input, mat2, offs)
    return torch._grouped_mm(input, mat2, offs=offs, bias=bias, out_dtype=out_dtype)


def fallback(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """As `transformers::grouped_mm_fallback`."""
    return grouped_mm(input, weight, offs)


RAISED: dict[Target, Callable[..., Tensor]] = {
    torch.nn.functional.grouped_mm: functional_grouped_mm,
    torch._grouped_mm: torch_grouped_mm,
}
NAMED: dict[str, Callable[..., Tensor]] = {"transformers::grouped_mm_fallback": fallback}
"""Operator name -> replacement, for operators that exist only once their library has been imported."""
