"""The role whose name alone has given an axis its entry."""

from __future__ import annotations

import pytest

from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.plan.recipes import resolve


@pytest.mark.parametrize(
    "plan, wanted",
    [
        (None, {"dp": "dp", "cp": "cp", "pp": "pp"}),
        ("ulysses", {"dp": "dp", "cp": "", "pp": "pp"}),
        ("cp: heads@attention > seq", {"dp": "dp", "cp": "", "pp": "pp"}),
        ("auto", {"dp": "", "cp": "", "pp": "pp"}),
    ],
)
def test_an_entry_that_nobody_asked_for_knows_its_role(plan: str | None, wanted: dict[str, str]) -> None:
    """Also where it has been resolved before; as text it is an entry by hand."""
    mesh = Mesh("dp=2,cp=2,pp=2")
    resolved = resolve(plan, mesh)
    for again in (resolved, resolve(resolved, mesh)):
        assert {entry.axis: entry.role for entry in again.axes} == wanted
    assert {entry.role for entry in Plan(str(resolved)).axes} == {""} and Plan(str(resolved)) == resolved
