"""Axes that have more ranks than the model has heads for them: from here on two axes stand for each (`meshc/plan/by_group.py`, `by_name.py`).

    tp=4, "tp: heads, ffn"       of a model with 2 key-value heads for 8 of queries       tp_kv_heads=2,tp_group=2, and an entry for each
    cp=4, of which nothing is said       of a model with 6 heads                          cp_seq=2,cp_heads=2, likewise

How many heads there are is known when factors have names, and no pass before has asked for the mesh or the plan: it goes on with others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshc.ir.mesh import Axis, Mesh
from meshc.passes.driver.choose import open_axes
from meshc.passes.phases.placed import Placed
from meshc.passes.written.shared_keys import lines_for_keys
from meshc.plan.by_group import GROUP, SHARED, parts_by_group
from meshc.plan.by_name import HEADS, parts_by_name
from meshc.plan.by_node import with_axes_apart


def with_heads_apart(placed: Placed) -> Placed:
    """With such axes taken apart, and a note for each; as it is where there is none, where a search has axes to decide about, and where
    another program has settled how parameters lie."""
    if placed.request.fixed or open_axes(placed.plan):
        return placed
    return _by_name(_by_group(placed))


def _by_group(placed: Placed) -> Placed:
    parts = parts_by_group(placed.plan, placed.mesh, _sizes(placed, SHARED[0]), _sizes(placed, GROUP[0]))
    told = _on(placed, parts)
    for heads, group in parts.values():
        plan = told.plan + lines_for_keys(told, heads.name, group.name)
        told = told.again(replace(told.request, plan=plan))
    return told.noting(*(
        f"{axis}: taken apart into {heads} and {group}: {heads.name} splits the {heads.size} key-value heads, {group.name} the heads of "
        "queries that share each; its ranks have the same keys and values"
        for axis, (heads, group) in parts.items()
    ))  # fmt: skip


def _by_name(placed: Placed) -> Placed:
    heads = _sizes(placed, HEADS, but=GROUP[0])
    parts = parts_by_name(placed.plan, placed.mesh, heads)
    counts = ", ".join(map(str, sorted({*heads})))
    return _on(placed, parts).noting(*(
        f"{axis}: taken apart into {rest} and {part}: {placed.mesh.size(axis)} ranks do not divide {counts} heads, {part.size} do; along "
        f"{rest.name} positions stay split in attention too"
        for axis, (rest, part) in parts.items()
    ))  # fmt: skip


def _sizes(placed: Placed, name: str, but: str = "") -> list[int]:
    """Of the factors that are called so, and not `but` as well."""
    sizes = placed.factors.size
    return [placed.real(sizes[factor]) for factor, also in placed.names.also.items() if name in also and but not in also]


def _on(placed: Placed, parts: Mapping[str, tuple[Axis, ...]]) -> Placed:
    if not parts:
        return placed
    mesh = placed.mesh
    axes = [one for axis in mesh.axes for one in parts.get(axis.name, (axis,))]
    finer = Mesh.from_axes(axes, mesh.device_type, mesh.ranks)
    return placed.again(replace(placed.request, mesh=finer, plan=with_axes_apart(placed.plan, parts)))
