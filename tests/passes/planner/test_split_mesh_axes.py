"""Axes that are taken apart by how many heads there are, where another program has settled how parameters lie."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.passes.driver import compile_program as driver
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.planner.split_mesh_axes import split_axes
from meshc.plan.plan import Plan
from meshc.plan.recipes import PlanLike, resolve
from meshc.plan.split_axes import parts_between, with_axes_apart
from tests import models
from tests.captured import Captured

BOTH = "cp: heads*seq@attention > seq"


@pytest.fixture(scope="module")
def placed() -> PlacedModel:
    """Of four heads."""
    captured = Captured(models.nanogpt(layers=1), train=False, double=False)
    with torch.no_grad():
        return driver.update_and_factorize(captured.traced)


def on(placed: PlacedModel, mesh: Mesh, plan: PlanLike, fixed: bool) -> PlacedModel:
    request = replace(placed.request, mesh=mesh, plan=plan, fixed={"a parameter": None} if fixed else {})
    return split_axes(placed.restart_for_request(request))


@pytest.mark.parametrize("plan", [None, BOTH])
def test_a_second_program_is_for_the_axes_of_the_first(placed: PlacedModel, plan: str | None) -> None:
    """Both are asked for one axis; the second finds two in the store, and gets the first's entries by its own plan."""
    mesh = Mesh("cp=8")
    first = on(placed, mesh, plan, fixed=False)
    assert str(first.mesh) == "cp_seq=2,cp_heads=4"
    parts = parts_between(mesh, first.mesh)
    assert parts is not None
    second = on(placed, first.mesh, with_axes_apart(resolve(plan, mesh), parts), fixed=True)
    assert second.plan == first.plan and second.mesh == first.mesh


def test_an_axis_that_the_first_has_left_whole_stays_so(placed: PlacedModel) -> None:
    assert str(on(placed, Mesh("cp=8"), None, fixed=True).mesh) == "cp=8"
    with pytest.raises(PlanError, match=r"cp_seq=2 and cp_heads=4 in it\n  what to do: compile the other one with this line too"):
        on(placed, Mesh("cp=8"), BOTH, fixed=True)


@pytest.mark.parametrize("ranks, entry", [(4, "cp: heads@attention > seq"), (3, "cp: seq@attention > seq")])
def test_where_one_factor_takes_all_ranks_the_axis_is_one(placed: PlacedModel, ranks: int, entry: str) -> None:
    for fixed in (False, True):
        found = on(placed, Mesh(f"cp={ranks}"), BOTH, fixed)
        assert found.plan == Plan(entry) and str(found.mesh) == f"cp={ranks}"
