"""Memory of results and operands, as torch's schemas have it."""

from __future__ import annotations

import pytest
import torch

from meshc.ir.schemas import RESHAPES, in_place_form, returns_view, written_arguments, written_operands
from meshc.ops import optim
from meshc.ops.in_place import WRITERS

aten = torch.ops.aten


@pytest.mark.parametrize("target", RESHAPES, ids=str)
def test_a_reshape_keeps_elements_in_order_and_memory_where_it_can(target: object) -> None:
    x = torch.arange(6.0)
    result = target(x, [2, 3])  # type: ignore[operator]
    assert result.tolist() == [[0, 1, 2], [3, 4, 5]] and result.data_ptr() == x.data_ptr() and returns_view(target)  # type: ignore[arg-type]


def test_what_allocates_returns_no_view() -> None:
    assert [returns_view(one) for one in (aten.t.default, aten.split.Tensor, aten.add_.Tensor)] == [True, True, True]
    assert [returns_view(one) for one in (aten.clone.default, aten.mm.default, aten.cat.default)] == [False, False, False]


def test_written_operands_by_position_by_name_and_of_lists() -> None:
    x, y, z = (torch.full((1,), float(each)) for each in range(3))
    assert written_arguments(aten.add_.Tensor) == {0: "self"} and written_arguments(aten.add.Tensor) == {}
    assert written_arguments(aten.add.out) == {3: "out"}
    assert [one.item() for one in written_operands(aten.add.out, (x, y), {"out": z})] == [2]
    assert [one.item() for one in written_operands(aten._foreach_add_.List, ([x, z], [y, y]), {})] == [0, 2]
    assert written_operands(aten.add.out, (x, y), {}) == []


def test_every_operator_of_a_program_that_writes_is_a_writer_and_its_functional_form_writes_nothing() -> None:
    assert all(written_arguments(one) for one in WRITERS) and not any(map(written_arguments, optim.UPDATES))
    assert all(0 in written_arguments(in_place_form(one)) for one in (aten.add.Tensor, aten.index_copy.default))
    assert in_place_form(aten.add.Tensor) is aten.add_.Tensor
