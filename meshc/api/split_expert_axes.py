"""Mesh and plan with each expert axis that crosses nodes split in two before compilation: one axis across nodes, one inside a node.

    Mesh("ep=16"), "ep: experts > batch"       on nodes of 8 ranks       Mesh("ep_across=2,ep_inside=8"), and an entry for each

How many ranks a node has is a figure of the device (`meshc/cost/devices.py`). What is taken apart by how many heads there are, a pass takes
apart (`passes/planner/split_by_heads.py`); what a plan says of that is refused here, where it cannot be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from meshc.cost.devices import devices_of
from meshc.cost.links import across_and_inside
from meshc.errors import PlanError
from meshc.ir.mesh import DATA_ROLES, Axis, Mesh, role
from meshc.options import Options, refuse_others
from meshc.plan.entries import AxisEntry, FactorTerm
from meshc.plan.recipes import PlanLike, resolve
from meshc.plan.split_axes import expert_axes, parts_by_node, taken_apart, with_axes_apart


def with_parts(mesh: Mesh | DeviceMesh, plan: PlanLike, options: Options) -> tuple[Mesh | DeviceMesh, PlanLike]:
    """The mesh and the plan with two axes for each that is taken apart where experts lie on several nodes; themselves if none is.

    With a DeviceMesh every rank calls this at once, and its groups are made. Raises PlanError for what cannot be taken apart.
    """
    refuse_others(options)
    given = Mesh.of(mesh)
    for entry, term in taken_apart(resolve(plan, given)):
        _refuse(given, entry, term)
    return _by_node(mesh, plan, options)


def _by_node(mesh: Mesh | DeviceMesh, plan: PlanLike, options: Options) -> tuple[Mesh | DeviceMesh, PlanLike]:
    if options.experts.dispatch == "flat":
        return mesh, plan
    given = Mesh.of(mesh)
    resolved, device = resolve(plan, given), devices_of(given).slowest()
    parts = parts_by_node(resolved, given, device.ranks_per_node)
    if parts:
        axes = [one for axis in given.axes for one in parts.get(axis.name, (axis,))]
        mesh, plan = finer(given, axes), with_axes_apart(resolved, parts)
        given, resolved = Mesh.of(mesh), plan
    if options.experts.dispatch == "hierarchical" and across_and_inside(given, expert_axes(resolved), device) is None:
        raise PlanError(
            options.as_written('Options(experts=Experts(dispatch="hierarchical"))')
            + f": of the axes of {given} that split experts none leads to other nodes and has several "
            f"ranks in each, as many everywhere; {device.name} has {device.ranks_per_node} ranks a node\n"
            "  what to do: leave the option out; or, where a node has another number of ranks, say so in ranks_per_node of the file of "
            "devices (docs/cost-model.md), as `meshc calibrate` does under a launcher"
        )
    return mesh, plan


def _refuse(mesh: Mesh, entry: AxisEntry, term: FactorTerm) -> None:
    if role(entry.axis) in (*DATA_ROLES, "pp"):
        does = "has stages" if role(entry.axis) == "pp" else "splits the batch"
        raise PlanError(
            f"{entry.where}: {entry.axis} {does} by its name, and {term} makes two axes of it that have other names\n"
            "  what to do: give the axis another name, such as cp"
        )
    taken = [name for name in (f"{entry.axis}_{term.factor}", f"{entry.axis}_{term.rest}") if name in mesh.names]
    if taken:
        raise PlanError(f"{entry.where}: {term} makes an axis {taken[0]}, which the mesh {mesh} has already; give that one another name")


def finer(mesh: Mesh, axes: Sequence[Axis]) -> Mesh | DeviceMesh:
    """The mesh with `axes`: the same ranks in the same order."""
    if mesh.device_mesh is None:
        return Mesh.from_axes(axes, mesh.device_type, mesh.ranks)
    table = mesh.device_mesh.mesh.reshape([axis.size for axis in axes])
    return DeviceMesh(mesh.device_type, table, mesh_dim_names=tuple(axis.name for axis in axes))
