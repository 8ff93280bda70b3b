"""Axes that are taken apart: before anything is compiled, the mesh gets two axes for one.

    Mesh("cp=8"), "cp: heads*seq@attention > seq"        of a model of 4 heads        Mesh("cp_seq=2,cp_heads=4"), and an entry for each
    Mesh("ep=16"), "ep: experts > batch"                 on nodes of 8 ranks          Mesh("ep_across=2,ep_inside=8"), likewise

How many heads there are is known when the model has been traced, so it is traced once more than without. All ranks do that alike. How many
ranks a node has is a figure of the device (`meshc/cost/devices.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshc.api.asked import Asked
from meshc.api.options import refuse_others
from meshc.cost.devices import for_mesh
from meshc.cost.links import across_and_inside
from meshc.errors import PlanError
from meshc.ir.mesh import DATA_ROLES, Axis, Mesh, role
from meshc.later import Later
from meshc.plan.by_node import expert_axes, parts_by_node, with_axes_apart
from meshc.plan.entries import AxisEntry, Term
from meshc.plan.plan import Plan
from meshc.plan.products import parts_of, taken_apart
from meshc.plan.recipes import PlanLike, resolve
from meshc.runtime.state.ownership import calls_allowed

if TYPE_CHECKING:
    from meshc.passes.driver import compile as driver
else:
    driver = Later("meshc.passes.driver.compile")


def with_parts(
    what: Any, mesh: Mesh | DeviceMesh, plan: PlanLike, args: Sequence[object], kwargs: Mapping[str, object], **how: Any
) -> tuple[Mesh | DeviceMesh, PlanLike]:
    """The mesh and the plan with two axes for each that is taken apart: by the plan, or where experts lie on several nodes; themselves if
    none is.

    how: the rest of what `Asked` takes. With a DeviceMesh every rank calls this at once, and its groups are made.
    Raises PlanError for what cannot be taken apart.
    """
    refuse_others(how["options"])
    mesh, plan = _by_factor(what, mesh, plan, args, kwargs, how)
    return _by_node(mesh, plan, how["options"].expert_dispatch)


def _by_node(mesh: Mesh | DeviceMesh, plan: PlanLike, dispatch: str) -> tuple[Mesh | DeviceMesh, PlanLike]:
    if dispatch == "flat":
        return mesh, plan
    given = Mesh.of(mesh)
    resolved, device = resolve(plan, given), for_mesh(given)
    parts = parts_by_node(resolved, given, device.ranks_per_node)
    if parts:
        axes = [one for axis in given.axes for one in parts.get(axis.name, (axis,))]
        mesh, plan = finer(given, axes), with_axes_apart(resolved, parts)
        given, resolved = Mesh.of(mesh), plan
    if dispatch == "hierarchical" and across_and_inside(given, expert_axes(resolved), device) is None:
        raise PlanError(
            f'Options(expert_dispatch="hierarchical"): of the axes of {given} that split experts none leads to other nodes and has several '
            f"ranks in each, as many everywhere; {device.name} has {device.ranks_per_node} ranks a node\n"
            "  what to do: leave the option out; or, where a node has another number of ranks, say so in ranks_per_node of the file of "
            "devices (docs/cost-model.md), as `meshc calibrate` does under a launcher"
        )
    return mesh, plan


def _by_factor(
    what: Any, mesh: Mesh | DeviceMesh, plan: PlanLike, args: Sequence[object], kwargs: Mapping[str, object], how: Mapping[str, Any]
) -> tuple[Mesh | DeviceMesh, PlanLike]:
    given = Mesh.of(mesh)
    resolved = resolve(plan, given)
    apart = taken_apart(resolved)
    if not apart:
        return mesh, plan
    for entry, term in apart:
        _refuse(given, entry, term, bool(args or kwargs))
    sizes = _sizes(what, given, resolved, args, kwargs, how)
    axes: list[Axis] = []
    entries: list[AxisEntry] = []
    terms = {entry.axis: term for entry, term in apart}
    for axis, entry in zip(given.axes, resolved.axes, strict=True):
        if axis.name not in terms:
            axes.append(axis)
            entries.append(entry)
            continue
        term = terms[axis.name]
        if not sizes.get(term.factor):
            known = ", ".join(sorted(name for name in sizes if "." not in name))
            raise PlanError(f"{entry.where}: the model has no factor {term.factor!r}; it has {known}")
        for part, own in parts_of(entry, term, axis.size, sizes[term.factor]):
            axes.append(part)
            entries.append(own)
    return mesh if tuple(axes) == given.axes else finer(given, axes), resolved.having(entries)


def _refuse(mesh: Mesh, entry: AxisEntry, term: Term, has_examples: bool) -> None:
    if role(entry.axis) in (*DATA_ROLES, "pp"):
        does = "has stages" if role(entry.axis) == "pp" else "splits the batch"
        raise PlanError(
            f"{entry.where}: {entry.axis} {does} by its name, and {term} makes two axes of it that have other names\n"
            "  what to do: give the axis another name, such as cp"
        )
    taken = [name for name in (f"{entry.axis}_{term.factor}", f"{entry.axis}_{term.rest}") if name in mesh.names]
    if taken:
        raise PlanError(f"{entry.where}: {term} makes an axis {taken[0]}, which the mesh {mesh} has already; give that one another name")
    if not has_examples:
        raise PlanError(
            f"{entry.where}: how many ranks {term.factor} take is known when the model has been traced\n  what to do: pass example "
            f"inputs to meshc.compile (args=, kwargs=), or write two axes, as in a mesh of {entry.axis}=2,hp=4"
        )


def _sizes(
    what: Any, mesh: Mesh, plan: Plan, args: Sequence[object], kwargs: Mapping[str, object], how: Mapping[str, Any]
) -> dict[str, list[int]]:
    """By what dims of the model are called: their sizes."""
    without = plan.having([AxisEntry(entry.axis) for entry in plan.axes], stores=(), operators=())
    asked = Asked(what, mesh, Plan.of(without.axes), **how)
    examples = asked.whole(asked.by_name(tuple(args), dict(kwargs)))
    request = asked.request(*examples, None, None, depth="whole")
    with calls_allowed(asked.module), torch.set_grad_enabled(request.grad):
        placed = driver.place(request)
    found: dict[str, list[int]] = {}
    for factor, names in placed.names.also.items():
        for name in names:
            found.setdefault(name, []).append(placed.factors.size[factor])
    return found


def finer(mesh: Mesh, axes: Sequence[Axis]) -> Mesh | DeviceMesh:
    """The same ranks in the same order, along more axes."""
    if mesh.device_mesh is None:
        return Mesh.from_axes(axes, mesh.device_type, mesh.ranks)
    table = mesh.device_mesh.mesh.reshape([axis.size for axis in axes])
    return DeviceMesh(mesh.device_type, table, mesh_dim_names=tuple(axis.name for axis in axes))
