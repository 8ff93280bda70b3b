"""Rows of libraries as data: each has a name of its own and builds what it says; their loss, their stubs. No library is needed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.zoo.libraries.command import ROWS
from tests.zoo.libraries.row import Row, below, found_at, normal, part, total
from tests.zoo.libraries.stubs import nms
from tests.zoo.trying import NotBuilt, says_all


def test_every_row_has_a_name_of_its_own() -> None:
    assert not [key for key, count in Counter((row.library, row.name) for row in ROWS).items() if count > 1]
    assert len(ROWS) > 300 and len({row.library for row in ROWS}) == 10


def test_a_row_is_built_by_paths_and_parts() -> None:
    row = Row("torch", "a", part("torch.nn.Sequential", part("torch.nn.Linear", 8, 3, bias=False)), {"input": normal(4, 8)},
              part("torch.nn.CrossEntropyLoss"), {"target": below(3, 4)})  # fmt: skip
    case = row.case()
    assert [name for name, _ in case.model.named_parameters()] == ["0.weight"]
    assert isinstance(case.loss, torch.nn.CrossEntropyLoss) and case.target_kwargs["target"].shape == (4,)
    assert row.case().kwargs["input"].equal(case.kwargs["input"])


def test_a_row_that_does_not_run_says_why() -> None:
    with pytest.raises(NotBuilt, match="ModuleNotFoundError: No module named 'no_such_library'"):
        Row("a", "b", part("no_such_library.Net"), {}).case()
    with pytest.raises(NotBuilt, match="mat1 and mat2"):
        Row("torch", "b", part("torch.nn.Linear", 8, 3), {"input": normal(4, 7)}).case()
    assert found_at("torch.nn.functional.relu") is F.relu


def test_the_loss_is_of_every_floating_tensor_that_comes_out() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])
    expected = F.silu(one).mean() + F.silu(other).mean()
    assert total({"a": one, "b": (torch.tensor([7]), [other], None)}) == expected


def test_the_stub_of_nms_leaves_what_overlaps_no_better_box() -> None:
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 1.0, 10.0, 10.0], [20.0, 20.0, 30.0, 30.0], [0.0, 0.0, 10.0, 5.0]])
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.1, 0.4]), 0.5).tolist() == [1, 3, 2]


def test_a_refusal_is_clear_with_a_line_and_something_to_write() -> None:
    assert says_all("at net.py:12 `if h.sum() > 0`; what to do: torch.where")
    assert not says_all("at net.py:12 in forward") and not says_all("what to do: torch.where")
