"""Products of runs of rows, and of rows that choose, against one product a row, and torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshc.ops.grouped_mm import NAMED, functional_grouped_mm, grouped_mm, grouped_outer, torch_grouped_mm
from meshc.ops.routed_mm import routed_mm, routed_outer
from meshc.runtime.simulator.float64_comparison import WidenedOperators

GENERATOR = torch.Generator().manual_seed(0)
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
MATRIX_OF_ROW = torch.tensor([0, 0, 2, 2, 2, 2, 2])


def f(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


def test_each_row_meets_the_matrix_of_its_run() -> None:
    rows, matrices = f(7, 5), f(3, 5, 4)
    torch.testing.assert_close(grouped_mm(rows, matrices, ENDS), torch.einsum("rk,rkn->rn", rows, matrices[MATRIX_OF_ROW]))
    torch.testing.assert_close(grouped_mm(rows, matrices.mT.contiguous().mT, ENDS.long()), grouped_mm(rows, matrices, ENDS))


def test_rows_behind_the_last_run_give_zeros() -> None:
    rows, matrices = f(9, 5), f(3, 5, 4)
    assert torch.equal(grouped_mm(rows, matrices, ENDS)[7:], torch.zeros(2, 4, dtype=torch.float64))
    assert torch.equal(grouped_outer(rows, f(9, 4), ENDS)[1], torch.zeros(5, 4, dtype=torch.float64))


def test_rows_in_any_order_meet_the_matrix_that_they_choose() -> None:
    rows, matrices, choice = f(7, 5), f(3, 5, 4), torch.tensor([2, 0, 2, 3, -1, 0, 2])
    wanted = torch.einsum("rk,rkn->rn", rows, matrices[choice.clamp(0, 2)])
    wanted[[3, 4]] = 0.0
    torch.testing.assert_close(routed_mm(rows, matrices, choice), wanted)


@pytest.mark.parametrize("product, shape", [(routed_mm, (3, 5, 4)), (lambda a, b, choice: routed_outer(a, b, choice, 3), (7, 4))])
def test_gradients_of_rows_in_any_order(product, shape) -> None:  # type: ignore[no-untyped-def]
    operands, choice = (f(7, 5).requires_grad_(), f(*shape).requires_grad_()), torch.tensor([2, 0, 2, 3, -1, 0, 2])
    assert torch.autograd.gradcheck(lambda a, b: product(a, b, choice), operands)
    assert torch.autograd.gradgradcheck(lambda a, b: product(a, b, choice), operands)


@pytest.mark.parametrize("product, shape", [(grouped_mm, (3, 5, 4)), (grouped_outer, (9, 4))])
def test_gradients_once_and_twice(product, shape) -> None:  # type: ignore[no-untyped-def]
    operands = (f(9, 5).requires_grad_(), f(*shape).requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: product(a, b, ENDS), operands)
    assert torch.autograd.gradgradcheck(lambda a, b: product(a, b, ENDS), operands)


def test_a_gradient_that_nobody_wants_is_not_made() -> None:
    rows, matrices = f(7, 5).requires_grad_(), f(3, 5, 4)
    with torch.profiler.profile() as profile:
        grouped_mm(rows, matrices, ENDS).sum().backward()
    assert "meshc::grouped_outer" not in {event.name for event in profile.events()}


@pytest.mark.parametrize("grouped", [functional_grouped_mm, torch_grouped_mm])
def test_it_gives_what_torch_gives(grouped) -> None:  # type: ignore[no-untyped-def]
    """Rows against matrices; and what goes torch's own way: products of runs of columns with runs of rows."""
    ends = torch.tensor([8, 8, 16], dtype=torch.int32)
    rows, matrices = f(16, 8, dtype=torch.float32), f(3, 8, 12, dtype=torch.float32)
    torch.testing.assert_close(grouped(rows, matrices, offs=ends), F.grouped_mm(rows, matrices, offs=ends))
    torch.testing.assert_close(grouped(rows.t(), rows, offs=ends), F.grouped_mm(rows.t(), rows, offs=ends))
    torch.testing.assert_close(grouped(rows.view(2, 8, 8), matrices[:2]), F.grouped_mm(rows.view(2, 8, 8), matrices[:2]))


def test_it_gives_what_stock_models_fall_back_to() -> None:
    from transformers.integrations import moe  # noqa: F401 - registers the operator

    rows, matrices = f(9, 5).requires_grad_(), f(3, 5, 4).requires_grad_()
    wanted = torch.ops.transformers.grouped_mm_fallback(rows, matrices, ENDS)
    found = NAMED["transformers::grouped_mm_fallback"](rows, matrices, ENDS)
    torch.testing.assert_close(found, wanted)
    of_found, of_wanted = (torch.autograd.grad(made.square().sum(), (rows, matrices)) for made in (found, wanted))
    torch.testing.assert_close(of_found, of_wanted)


def test_the_reference_in_float64_is_what_torch_refuses_there() -> None:
    """Against torch's in float32, gradients too; rows behind the last run are anything in torch's."""
    ends = torch.tensor([8, 8, 16], dtype=torch.int32)
    rows, matrices = f(16, 8).requires_grad_(), f(3, 12, 8).requires_grad_()
    with pytest.raises(RuntimeError):
        F.grouped_mm(rows, matrices.mT, offs=ends)
    with WidenedOperators():
        found = F.grouped_mm(rows, matrices.mT, offs=ends)
        of_found = torch.autograd.grad(found.square().sum(), (rows, matrices))
    single = rows.detach().float().requires_grad_(), matrices.detach().float().requires_grad_()
    wanted = F.grouped_mm(single[0], single[1].mT, offs=ends)
    torch.testing.assert_close(found.float(), wanted)
    for one, other in zip(of_found, torch.autograd.grad(wanted.square().sum(), single), strict=True):
        torch.testing.assert_close(one.float(), other, rtol=1e-4, atol=1e-4)
