"""The list of operators that a text may name: what the compiler can emit is on it, and what it may not hold is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from meshc.check.operators import PIECES
from meshc.ops.in_place import WRITERS
from meshc.rules import every_family, has_rule, operator_of
from meshc.text.allowed_operators import FUNCTIONS, OPERATORS, resolve, spelling
from tests.zoo.operators import used

DROPPED = {"aten.cholesky": "2.14"}
"""Operators that a release of torch has no more, and earlier ones have."""
LISTED: dict[str, Any] = {name: resolve(name) for name in sorted(OPERATORS) if TorchVersion(torch.__version__) < DROPPED.get(name, "9")}
UNSAVED = {"aten.as_strided", "aten.as_strided_scatter"}
"""What a trace may hold beside the list: it speaks of memory. Such a model runs in the process that compiles it and cannot be saved."""


def test_the_file_is_sorted_and_every_name_is_an_operator() -> None:
    assert [name for name in sorted(OPERATORS) if name in LISTED or name not in DROPPED] == list(LISTED)
    assert all(spelling(op) == name for name, op in LISTED.items())


def test_every_operator_with_a_rule_is_listed() -> None:
    ruled = {spelling(op) for family in every_family() for op in family.OPERATORS if has_rule(op) and op not in FUNCTIONS.values()}
    assert len(ruled) > 250
    assert ruled - OPERATORS <= UNSAVED


def test_every_operator_of_the_zoo_is_listed() -> None:
    assert {name for name in used() if name.startswith(("aten.", "meshc."))} - OPERATORS == set()


def test_every_operator_of_meshcs_own_is_listed() -> None:
    names = {schema.name.replace("::", ".") for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("meshc::")}
    assert names - OPERATORS == set()


@pytest.mark.parametrize("name", ["aten", "meshc"])
def test_nothing_listed_writes_or_draws(name: str) -> None:
    for spelled, op in LISTED.items():
        if not spelled.startswith(f"{name}."):
            continue
        schema = op._schema
        assert not schema.is_mutable or op in WRITERS, spelled
        assert not any(argument.is_out or "Generator" in str(argument.type) for argument in schema.arguments), spelled
        assert torch.Tag.nondeterministic_seeded not in op.tags, spelled
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "Meta"), f"{spelled} says nothing of its shapes"


def test_how_many_results_a_listed_operator_gives_is_known_before_it_gives_them() -> None:
    lists = {op for op in LISTED.values() if any("List" in str(result.type) for result in op._schema.returns)}
    assert lists == set(PIECES)


def test_what_a_listed_operator_leaves_unwritten_is_zeroed() -> None:
    unwritten = {spelling(op) for family in every_family() for op in family.OPERATORS if operator_of(op).uninitialised}
    assert unwritten == {name for name in OPERATORS if name.startswith(("aten.empty", "aten.new_empty"))}
