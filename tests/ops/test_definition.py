"""Operands in a text fit where their sizes, dtypes and numbers do, and what they are decides the results' shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshc.ops.definition import _check_sizes, _empty_results


def check(text: str, **given: Any) -> dict[str, Any] | None:
    try:
        return dict(_check_sizes(text, "{operator} takes them", None)({"operator": "op", **given}))
    except ValueError as error:
        assert str(error).startswith("meshc::op: op takes them; given are ")
        return None


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("text", "given", "sizes"),
    [
        ("x [t, h]", {"x": x(2, 3)}, {"t": 2, "h": 3}),
        ("x [t, h]", {"x": x(2, 3, 4)}, None),
        ("x [t, t]", {"x": x(2, 3)}, None),
        ("x [1, t]", {"x": x(1, 3)}, {"t": 3}),
        ("x [1, t]", {"x": x(2, 3)}, None),
        ("x [..]", {"x": x()}, {"..": ()}),
        ("x [.., h]", {"x": x(2, 3, 4)}, {"..": (2, 3), "h": 4}),
        ("x [a, .., h]", {"x": x(2, 4)}, {"a": 2, "..": (), "h": 4}),
        ("x [a, .., h]", {"x": x(2)}, None),
        ("x [a, b, .., h]", {"x": x(2)}, None),
        ("x [.., h], y [..]", {"x": x(2, 3, 4), "y": x(2, 3)}, {"..": (2, 3), "h": 4}),
        ("x [.., h], y [..]", {"x": x(2, 3, 4), "y": x(2)}, None),
        ("x:float [t]", {"x": x(2)}, {"t": 2}),
        ("x:float [t]", {"x": x(2, dtype=torch.float16)}, None),
        ("x:int64 [t]", {"x": x(2, dtype=torch.int32)}, None),
        ("x:integer [t]", {"x": x(2, dtype=torch.int32)}, {"t": 2}),
        ("x [t], y:x [t]", {"x": x(2), "y": x(2, dtype=torch.float64)}, None),
        ("x [t], t >= 2, n >= 0", {"x": x(2), "n": 0}, {"t": 2}),
        ("x [t], t >= 2, n >= 0", {"x": x(1), "n": 0}, None),
        ("x [t], t >= 2, n >= 0", {"x": x(2), "n": -1}, None),
    ],
)
def test_operands_fit_by_their_text(text: str, given: dict[str, Any], sizes: dict[str, Any] | None) -> None:
    assert check(text, **given) == (None if sizes is None else {"1": 1, **sizes})


def test_results_have_sizes_of_operands_and_numbers() -> None:
    given = {"x": x(2, 3, 4, dtype=torch.float64), "n": 5, "..": (2, 3), "h": 4, "1": 1}
    found = _empty_results("x, x [1, .., n], x:int64 [h]")(given)
    assert isinstance(found, tuple)
    assert [(one.shape, one.dtype) for one in found] == [
        ((2, 3, 4), torch.float64), ((1, 2, 3, 5), torch.float64), ((4,), torch.int64),
    ]  # fmt: skip
