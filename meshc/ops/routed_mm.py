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
from meshc.ops.grouped_mm import differentiate_products, mm_of_runs, outer_of_runs


def mm_of_choices(rows: Tensor, matrices: Tensor, choice: Tensor) -> Tensor:
    """The kernel of `routed_mm`."""
    order, ends = _runs(choice, matrices.shape[0])
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    return out.index_copy_(0, order, mm_of_runs(rows.index_select(0, order), matrices, ends))


def outer_of_choices(left: Tensor, right: Tensor, choice: Tensor, count: int) -> Tensor:
    """The kernel of `routed_outer`."""
    order, ends = _runs(choice, count)
    return outer_of_runs(left.index_select(0, order), right.index_select(0, order), ends)


routed_mm = operator(
    "routed_mm", "rows [r, n]", "rows [r, k], matrices:rows [g, k, n], choice:integer [r]",
    rule="rows [r, k] meet matrices [g, k, n] of their dtype, each the one that integers [r] choose",
)(mm_of_choices)  # fmt: skip
routed_outer = operator(
    "routed_outer", "left [count, k, n]", "left [r, k], right:left [r, n], choice:integer [r], count >= 0",
    rule="left [r, k] and right [r, n] are of one dtype, and integers [r] choose one of {count}, 0 or more",
)(outer_of_choices)  # fmt: skip
differentiate_products(routed_mm, routed_outer)


def _runs(choice: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(order of the rows by choice, ends of the runs). Rows without a matrix are left out on a CPU, and last elsewhere."""
    ordered, order = torch.sort(torch.where(choice < 0, count, choice), stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, dtype=ordered.dtype, device=choice.device), right=True)
    return (order[: int(ends[-1])] if count and not choice.is_cuda else order), ends
