"""Mesh and plan with axes split in two by the model's number of heads (`meshc/plan/products.py`, `by_group.py`, `by_name.py`).

    cp=8, "cp: heads*seq@attention > seq"       of a model with 4 heads                          cp_seq=2,cp_heads=4, and an entry for each
    tp=4, "tp: heads, ffn"                      of one with 2 key-value heads for 8 of queries   tp_kv_heads=2,tp_group=2, likewise
    cp=4, without an entry                      of one with 6 heads                              cp_seq=2,cp_heads=2, likewise

The number of heads is known once factors have names. No earlier pass reads the mesh or the plan; later ones read the new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from meshc.errors import PlanError
from meshc.ir.mesh import Axis, Mesh
from meshc.lazy_module import LazyModule
from meshc.passes.phases.placed_model import PlacedModel
from meshc.plan.by_group import GROUP, SHARED, parts_by_group
from meshc.plan.by_name import HEADS, parts_by_name
from meshc.plan.by_node import with_axes_apart
from meshc.plan.plan import open_axes
from meshc.plan.products import factor_of, keep_one_factor, parts_of, taken_apart

if TYPE_CHECKING:
    from meshc.passes.planner import shared_key_pins
else:
    shared_key_pins = LazyModule("meshc.passes.planner.shared_key_pins")


def split_axes_by_heads(placed: PlacedModel) -> PlacedModel:
    """`placed` with such axes split, and a note for each axis that the plan does not split itself; unchanged where there is none. Where a
    search decides about axes, or another program has fixed the storage of parameters, only axes that the plan splits are.

    Raises PlanError for a factor that the model has not, and for an axis that the other program does not split.
    """
    placed = _by_product(placed)
    if placed.request.fixed or open_axes(placed.plan):
        return placed
    return _by_name(_by_group(placed))


def _by_product(placed: PlacedModel) -> PlacedModel:
    apart = taken_apart(placed.plan)
    parts: dict[str, tuple[Axis, ...]] = {}
    entries = {entry.axis: entry for entry in placed.plan.axes}
    for entry, term in apart:
        sizes, ranks = _sizes(placed, term.factor), placed.mesh.size(entry.axis)
        if not sizes:
            known = sorted({name for names in placed.names.also.values() for name in names if "." not in name})
            raise PlanError(f"{entry.where}: the model has no factor {term.factor!r}; it has {', '.join(known)}")
        found = parts_of(entry, term, ranks, sizes)
        if len(found) > 1:
            parts[entry.axis] = found
        else:
            entries[entry.axis] = keep_one_factor(entry, factor_of(term, ranks, sizes))
    if parts and placed.request.fixed:
        raise PlanError(
            f"{apart[0][0].where}: another program of this model has settled how its parameters lie, on the mesh {placed.mesh}, and this "
            f"one would have {' and '.join(str(part) for both in parts.values() for part in both)} in it\n"
            "  what to do: compile the other one with this line too, or leave it out here"
        )
    if not apart:
        return placed
    settled_plan = placed.plan.having(entries.values())
    return _with_split_axes(placed.restart_for_request(replace(placed.request, plan=settled_plan)), parts)


def _by_group(placed: PlacedModel) -> PlacedModel:
    parts = parts_by_group(placed.plan, placed.mesh, _sizes(placed, SHARED[0]), _sizes(placed, GROUP[0]))
    told = _with_split_axes(placed, parts)
    for heads, group in parts.values():
        plan = told.plan + shared_key_pins.pins_for_keys(told, heads.name, group.name)
        told = told.restart_for_request(replace(told.request, plan=plan))
    return told.with_notes(*(
        f"{axis}: taken apart into {heads} and {group}: {heads.name} splits the {heads.size} key-value heads, {group.name} the heads of "
        "queries that share each; its ranks have the same keys and values"
        for axis, (heads, group) in parts.items()
    ))  # fmt: skip


def _by_name(placed: PlacedModel) -> PlacedModel:
    heads = _sizes(placed, HEADS, but=GROUP[0])
    parts = parts_by_name(placed.plan, placed.mesh, heads)
    counts = ", ".join(map(str, sorted({*heads})))
    return _with_split_axes(placed, parts).with_notes(*(
        f"{axis}: taken apart into {rest} and {part}: {placed.mesh.size(axis)} ranks do not divide {counts} heads, {part.size} do; along "
        f"{rest.name} positions stay split in attention too"
        for axis, (rest, part) in parts.items()
    ))  # fmt: skip


def _sizes(placed: PlacedModel, name: str, but: str = "") -> list[int]:
    """Sizes of the factors named `name` and not `but`."""
    sizes = placed.factors.size
    return [placed.real(sizes[factor]) for factor, also in placed.names.also.items() if name in also and but not in also]


def _with_split_axes(placed: PlacedModel, parts: Mapping[str, tuple[Axis, ...]]) -> PlacedModel:
    if not parts:
        return placed
    mesh = placed.mesh
    axes = [one for axis in mesh.axes for one in parts.get(axis.name, (axis,))]
    finer = Mesh.from_axes(axes, mesh.device_type, mesh.ranks)
    return placed.restart_for_request(replace(placed.request, mesh=finer, plan=with_axes_apart(placed.plan, parts)))
