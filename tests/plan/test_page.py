"""docs/plans.md: what its example prints and what its errors say is what is printed and said."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshc
from meshc.recipes import explain, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()


def test_the_table_of_a_plan_is_the_one_on_the_page() -> None:
    mesh = meshc.Mesh("dp=2,tp=4")
    table = explain(resolve("fsdp+megatron_sp", mesh) + meshc.Plan("pin lm_head.weight: vocab/tp, _"), mesh)
    assert textwrap.indent(table, "    ") in PAGE


FAULTS: list[Callable[[], Any]] = [
    lambda: meshc.Plan("tp heads\n\ndp: batch; store param"),
    lambda: meshc.Plan("tpp: heads\npin a: ffn/tp, _\npin a: ffn!, _").check(meshc.Mesh("dp=2,tp=2")),
    lambda: resolve("auto", meshc.Mesh("dp=2,x=2")),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_its_errors_are_those_that_are_raised(fault: Callable[[], Any]) -> None:
    """But for where the page breaks a line."""
    with pytest.raises(meshc.PlanError) as caught:
        fault()
    assert " ".join(str(caught.value).split()) in " ".join(PAGE.split())
