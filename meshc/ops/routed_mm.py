"""`meshc::routed_mm` and `routed_outer`: product of each row with the matrix that it chooses, rows in any order, and its gradient.

    routed_mm(rows [r, k], matrices [g, k, n], choice [r]) -> [r, n]              row i times matrix choice[i]
    routed_outer(left [r, k], right [r, n], choice [r], count) -> [count, k, n]   for each choice, the sum over its rows of left (x) right

A row whose choice is out of range gives zeros. Rows are independent, so that a rank may have some of them: models sort the rows of all
experts first, and a sort needs all rows. The kernels sort the rows that they get.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator
from meshc.ops.grouped_mm import meet, mm_of_runs, outer_of_runs, pair
from meshc.ops.operands import misfit


def _fit_mm(rows: Tensor, matrices: Tensor, choice: Tensor) -> None:
    if not meet(rows, matrices) or not _chooses(choice, rows):
        rule = "rows [r, k] meet matrices [g, k, n] of their dtype, each the one that integers [r] choose"
        raise misfit("routed_mm", rule, rows=rows, matrices=matrices, choice=choice)


@operator("routed_mm", results=lambda rows, matrices, *_: rows.new_empty(rows.shape[0], matrices.shape[2]), fit=_fit_mm)
def routed_mm(rows: Tensor, matrices: Tensor, choice: Tensor) -> Tensor:
    return mm_of_choices(rows, matrices, choice)


def mm_of_choices(rows: Tensor, matrices: Tensor, choice: Tensor) -> Tensor:
    """The kernel of `routed_mm`."""
    order, ends = _runs(choice, matrices.shape[0])
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    return out.index_copy_(0, order, mm_of_runs(rows.index_select(0, order), matrices, ends))


def _fit_outer(left: Tensor, right: Tensor, choice: Tensor, count: int) -> None:
    if not pair(left, right) or not _chooses(choice, left) or count < 0:
        rule = f"left [r, k] and right [r, n] are of one dtype, and integers [r] choose one of {count}, 0 or more"
        raise misfit("routed_outer", rule, left=left, right=right, choice=choice)


@operator("routed_outer", results=lambda left, right, choice, count: left.new_empty(count, left.shape[1], right.shape[1]), fit=_fit_outer)
def routed_outer(left: Tensor, right: Tensor, choice: Tensor, count: int) -> Tensor:
    return outer_of_choices(left, right, choice, count)


def outer_of_choices(left: Tensor, right: Tensor, choice: Tensor, count: int) -> Tensor:
    """The kernel of `routed_outer`."""
    order, ends = _runs(choice, count)
    return outer_of_runs(left.index_select(0, order), right.index_select(0, order), ends)


def _chooses(choice: Tensor, rows: Tensor) -> bool:
    return choice.dim() == 1 and choice.shape[0] == rows.shape[0] and choice.dtype in (torch.int64, torch.int32)


def _runs(choice: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(order of the rows by choice, ends of the runs). Rows without a matrix are left out on a CPU, and last elsewhere."""
    ordered, order = torch.sort(torch.where(choice < 0, count, choice), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, dtype=ordered.dtype, device=choice.device), right=True)
    return (order[: int(ends[-1])] if count and not choice.is_cuda else order), ends


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, ctx.rest = inputs[:3], inputs[3:]
    ctx.save_for_backward(*tensors)


def _routed_mm_backward(ctx, grad):  # type: ignore[no-untyped-def]
    rows, matrices, choice = ctx.saved_tensors
    of_rows = routed_mm(grad, matrices.transpose(1, 2), choice) if ctx.needs_input_grad[0] else None
    of_matrices = routed_outer(rows, grad, choice, matrices.shape[0]) if ctx.needs_input_grad[1] else None
    return of_rows, of_matrices, None


def _routed_outer_backward(ctx, grad):  # type: ignore[no-untyped-def]
    left, right, choice = ctx.saved_tensors
    of_left = routed_mm(right, grad.transpose(1, 2), choice) if ctx.needs_input_grad[0] else None
    of_right = routed_mm(left, grad, choice) if ctx.needs_input_grad[1] else None
    return of_left, of_right, None, None


routed_mm.register_autograd(_routed_mm_backward, setup_context=_save)
routed_outer.register_autograd(_routed_outer_backward, setup_context=_save)
