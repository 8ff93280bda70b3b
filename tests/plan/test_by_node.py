"""Axes of experts over several nodes: which are taken apart, into what, and what lines about them say then."""

from __future__ import annotations

import pytest

from meshc.ir.mesh import Mesh
from meshc.plan.recipes import resolve
from meshc.plan.split_axes import expert_axes, parts_by_node, with_axes_apart


@pytest.mark.parametrize("mesh, plan, ranks_per_node, wanted", [
    ("ep=4", None, 2, "ep_across=2,ep_inside=2"),
    ("ep=16", None, 4, "ep_across=4,ep_inside=4"),
    ("dp=2,ep=4", None, 2, "ep_across=2,ep_inside=2"),
    ("ep=4,dp=2", None, 4, "ep_across=2,ep_inside=2"),  # each other rank of a node
    ("a=4", "a: experts > batch", 2, "a_across=2,a_inside=2"),
    ("ep=4", None, 4, ""),  # one node
    ("ep=2,dp=2", None, 2, ""),  # a rank of each node
    ("ep=6", None, 4, ""),  # four ranks of one, two of the other
    ("ep=4 ranks 0 2 1 3", None, 2, ""),  # to and fro
    ("ep=4 ranks 2 3 0 1", None, 2, "ep_across=2,ep_inside=2"),
    ("dp=4", "dp: experts > batch", 2, ""),  # another role goes by its name
    ("ep=4", "ep: batch", 2, ""),  # no experts
    ("ep=4,ep_inside=2", "ep_inside: -", 4, ""),  # there is one already
])  # fmt: skip
def test_which_are_taken_apart(mesh: str, plan: str | None, ranks_per_node: int, wanted: str) -> None:
    given = Mesh(mesh)
    found = parts_by_node(resolve(plan, given), given, ranks_per_node)
    assert [",".join(map(str, parts)) for parts in found.values()] == ([wanted] if wanted else [])


def test_lines_about_an_axis_name_both() -> None:
    given = Mesh("dp=2,ep=4")
    plan = resolve(
        "ep: experts > batch; store params\npin w: _, vocab/dp/ep * hidden!  only\nstore v state: hidden/ep, _\n"
        "pin op:mlp/forward: batch/ep, -/dp\npin op:head: -/ep\nremat mlp: cheap", given
    )  # fmt: skip
    assert expert_axes(plan) == ("ep",)
    made = with_axes_apart(plan, parts_by_node(plan, given, 2))
    assert str(made).splitlines() == [
        "dp: batch", "ep_across: experts > batch; store params", "ep_inside: experts > batch; store params",
        "pin w: _, vocab/dp/ep_across/ep_inside * hidden!  only",
        "pin op:mlp/forward: batch/ep_across/ep_inside, -/dp", "pin op:head: -/ep_across/ep_inside",
        "store v state: hidden/ep_across/ep_inside, _", "remat mlp: cheap",
    ]  # fmt: skip
    assert resolve(made, Mesh("dp=2,ep_across=2,ep_inside=2")) == made


def test_the_parts_have_the_role_of_the_axis() -> None:
    assert str(resolve(None, Mesh("ep_across=2,ep_inside=4"))) == "ep_across: experts > batch\nep_inside: experts > batch"
