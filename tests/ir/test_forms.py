"""Calls that look alike have one form, and no others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch

from meshc.ir import forms
from meshc.ir.forms import Forms

X = torch.zeros(2, 3)
PAIR = [X, X + 1]


def call(**changes: Any) -> Any:
    return ((X,), {"x": X, "cache": [PAIR, (X, None)], "flag": True, **changes})


OTHERS: dict[str, Any] = {
    "shape": call(x=X[:1]),
    "dtype": call(x=X.double()),
    "gradient": call(x=torch.zeros(2, 3, requires_grad=True)),
    "layout": call(x=X.to_sparse()),
    "device": call(x=X.to("meta")),
    "class": call(x=torch.nn.Parameter(X, requires_grad=False)),
    "value": call(flag=False),
    "value of another type": call(flag=1),
    "list for a tuple": call(cache=[PAIR, [X, None]]),
    "depth": call(cache=[PAIR, [(X, None)]]),
    "a leaf more": call(other=None),
    "order": ((X,), dict(reversed(call()[1].items()))),
    "by name": ((), {"y": X, **call()[1]}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_otherwise_has_another_form(name: str) -> None:
    seen = Forms()
    assert seen.of(OTHERS[name])[1] is not seen.of(call())[1] is not None


def test_what_looks_alike_has_one_form_and_its_own_leaves() -> None:
    seen, other = Forms(), torch.ones(2, 3)
    (_, first), (leaves, second) = seen.of(call()), seen.of(call(x=other))
    assert first is second and first is not None
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in (X, other, *PAIR, X, None, True)]


@pytest.mark.parametrize("value", [numpy.zeros(2), OrderedDict(x=X), {1, 2}, object()], ids=lambda value: type(value).__name__)
def test_what_nobody_knows_has_none(value: object) -> None:
    assert Forms().of(call(x=[value])) == ([], None)


def test_forms_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MOST", 2)
    seen = Forms()
    found = [seen.of([size])[1] for size in (1, 2, 3)]
    assert seen.of([3])[1] is found[2] and seen.of([1])[1] is not found[0]
