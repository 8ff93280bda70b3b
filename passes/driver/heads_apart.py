"""Axes that have more ranks than the model has key-value heads: from here on two axes stand for each (`meshc/plan/by_group.py`).

    tp=4, "tp: heads, ffn"       of a model with 2 key-value heads for 8 of queries       tp_kv_heads=2,tp_group=2, and an entry for each

How many heads there are is known when factors have names, and no pass before has asked for the mesh or the plan: it goes on with others.
"""

from __future__ import annotations

from dataclasses import replace

from meshc.ir.mesh import Mesh
from meshc.passes.driver.choose import open_axes
from meshc.passes.phases.placed import Placed
from meshc.passes.written.shared_keys import lines_for_keys
from meshc.plan.by_group import parts_by_group
from meshc.plan.by_node import with_axes_apart


def with_heads_apart(placed: Placed) -> Placed:
    """With such axes taken apart, and a note for each; as it is where there is none, where a search has axes to decide about, and where
    another program has settled how parameters lie."""
    request, sizes = placed.request, placed.factors.size
    if request.fixed or open_axes(placed.plan):
        return placed
    shared, groups = ([placed.real(sizes[factor]) for factor, also in placed.names.also.items() if name in also] for name in NAMES)
    mesh = placed.mesh
    parts = parts_by_group(placed.plan, mesh, shared, groups)
    if not parts:
        return placed
    axes = [one for axis in mesh.axes for one in parts.get(axis.name, (axis,))]
    finer = Mesh.from_axes(axes, mesh.device_type, mesh.ranks)
    told = placed.again(replace(request, mesh=finer, plan=with_axes_apart(placed.plan, parts)))
    for heads, group in parts.values():
        plan = told.plan + lines_for_keys(told, heads.name, group.name)
        told = told.again(replace(told.request, plan=plan))
    return told.noting(*(
        f"{axis}: taken apart into {heads} and {group}: {heads.name} splits the {heads.size} key-value heads, {group.name} the heads of "
        "queries that share each; its ranks have the same keys and values"
        for axis, (heads, group) in parts.items()
    ))  # fmt: skip


NAMES = ("kv_heads", "group")
