"""Axes of which only their names speak, and that have more ranks than heads go round for."""

from __future__ import annotations

import pytest

from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.plan.recipes import resolve
from meshc.plan.split_axes import parts_by_name, parts_by_node, with_axes_apart


@pytest.mark.parametrize(
    "mesh, heads, plan, wanted",
    [
        ("cp=4", [6], None, (2, 2)),
        ("cp=8", [4, 12], None, (2, 4)),
        ("cp=8", [4, 6], None, (4, 2)),
        ("cp=4", [8], None, None),  # all ranks divide
        ("cp=4", [5], None, None),  # none do
        ("cp=4", [], None, None),
        ("cp=4,tp=2", [12], None, (2, 2)),  # six are left by tp
        ("tp=2,cp=4", [2], None, None),
        ("cp=4,tp=3", [4], None, None),
        ("dp=2,cp=4", [6], "dp: batch", (2, 2)),
        ("cp=4", [6], "ulysses", None),
        ("cp=4", [6], "cp: heads@attention > seq", None),
        ("cp=4", [6], "store *.weight: heads/cp, _", None),  # which lie where they are said to
        ("cp=4", [6], "store *.weight: features/cp, _", (2, 2)),
        ("cp=4,cp_seq=2", [6], "cp_seq: batch", None),
    ],
)
def test_heads_go_as_far_as_they_divide(mesh: str, heads: list[int], plan: str | None, wanted: tuple[int, int] | None) -> None:
    given = Mesh(mesh)
    found = parts_by_name(resolve(plan, given), given, heads).get("cp")
    assert (found and tuple(part.size for part in found)) == wanted


def test_each_part_has_its_entry_and_lines_name_both() -> None:
    mesh = Mesh("cp=4")
    plan = resolve("store *.weight: features/cp, _", mesh)
    apart = with_axes_apart(plan, parts_by_name(plan, mesh, [6]))
    assert apart == Plan("cp_seq: seq\ncp_heads: heads@attention > seq\nstore *.weight: features/cp_seq/cp_heads, _")


def test_an_axis_that_a_line_takes_apart_is_left_to_it() -> None:
    """Also where it leads to other nodes, and may split experts."""
    mesh = Mesh("ep=4")
    assert parts_by_node(resolve("ep: experts > batch", mesh), mesh, 2) and not parts_by_node(Plan("ep: experts*seq > batch"), mesh, 2)
