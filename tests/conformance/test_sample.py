"""A few entries of torch's table, and that what is wrong is found. All of it: `make conformance`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.fx import Node

from meshc.rules import reduction
from meshc.rules.operator import Operator
from meshc.rules.rule import Rule
from tests.broad import broad
from tests.conformance.run import EXACT, WRONG, Conformance
from tests.conformance.torch_samples import entries

ENTRIES = entries()
EVERYDAY = ("add", "mm", "softmax", "cumsum", "argmax", "scatter_add", "nn_functional_group_norm", "var")
EVERY_TIME = ("index_put", "linalg_solve")
DRAWN = random.Random(2).sample(sorted(set(ENTRIES) - {*EVERYDAY, *EVERY_TIME}), 30)
FEWER = 4
SLOW = ("nn_functional_group_norm", "var", "scatter_add", "cumsum")
"""So many of those drawn, in each run of the tests."""


@pytest.mark.parametrize("name", [*EVERY_TIME, *DRAWN[:FEWER], *map(broad, DRAWN[FEWER:])])
def test_nothing_is_wrong(name: str) -> None:
    row = Conformance().run(name, ENTRIES[name], count=2)
    assert row["wrong"] == []


@pytest.mark.parametrize("name", [broad(name) if name in SLOW else name for name in EVERYDAY])
def test_everyday_operators_are_exact(name: str) -> None:
    row = Conformance().run(name, ENTRIES[name], count=3)
    assert row["status"] == EXACT and row["wrong"] == []
    assert row["splits"] > 10


def test_a_planted_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_of_local_means(node: Node, tensors: list[Node]) -> Rule:
        found = reduction._mean(node, tensors)
        return Rule(found.operands, found.results, found.sums)

    monkeypatch.setitem(reduction.OPERATORS, torch.ops.aten.mean.dim, Operator(mean_of_local_means))
    row: dict[str, Any] = Conformance().run("mean", ENTRIES["mean"], count=6)
    assert row["status"] == WRONG
    assert "aten.mean.dim" in row["wrong"][0]
