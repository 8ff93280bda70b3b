"""`meshc plan`: how a model is best run on so many devices, found without them: which mesh, which plan, what it takes."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from math import inf

from meshc.api.options import Options
from meshc.api.planning import Planned, Planner
from meshc.commands.target import harmless, load_target, read_plan
from meshc.cost import devices
from meshc.cost.devices import Device
from meshc.errors import MeshcError, PlanError
from meshc.ir.mesh import Mesh
from meshc.ir.quantities import read_bytes
from meshc.passes.driver.nothing_fits import NothingFits
from meshc.passes.stages.fit import DoesNotFit
from meshc.plan.factorizations import factorizations
from meshc.report.ranked import Ranked, ideal_seconds, ranked, text
from meshc.report.summary import bytes_text, seconds_text


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="FILE.py:FUNCTION", help="returns the model and example inputs; tensors on meta will do")
    command.add_argument("--devices", metavar="N", type=int, help="how many there are; several meshes of them are tried")
    command.add_argument("--mesh", metavar="AXES", nargs="+", help="these meshes and no others: dp=8,tp=8; the last axis is the innermost")
    command.add_argument("--device", metavar="NAME", default="h100", help=f"what they are: {', '.join(devices.names())}; default: h100")
    command.add_argument("--node", metavar="N", type=int, help="how many share the fast links of a node; default: the device's")
    command.add_argument("--memory", metavar="SIZE", help="what a rank may hold, as 80GB or 40 GiB; default: the device's memory")
    command.add_argument("--plan", default="auto", help="what is given of the plan: lines such as `dp: batch` or `tp: auto`; default: auto")
    command.add_argument("--top", metavar="N", type=int, default=5, help="how many plans are listed; default: 5")
    command.add_argument("--json", action="store_true", help="the list, and the plan that is taken, as JSON")
    command.add_argument("--grad", action="store_true", help="a module's backward too; without it a module is planned for inference")


def run(options: argparse.Namespace) -> None:
    device = _device(options)
    budget = int(device.memory_bytes) if options.memory is None else read_bytes(options.memory, "--memory")
    meshes = _meshes(options, device)
    what, args, kwargs = load_target(options.target)
    asked = Options(memory_budget=budget)
    planner = Planner(what, args, kwargs, device, asked, options.grad)
    found: list[tuple[Planned, list[Ranked]]] = []
    for mesh in meshes:
        one = planner.on(mesh, read_plan(options.plan))
        ideal = None if one.program is None else ideal_seconds(one.program, device)
        rows = ranked(str(Mesh.from_axes(mesh.axes)), one.weighed, ideal)
        found.append((one, rows))
        print(harmless(_progress(one, rows)), file=sys.stderr, flush=True)
    fitting = [(one, rows) for one, rows in found if rows]
    if not fitting:
        raise _nothing(found)
    best, rows = min(fitting, key=lambda pair: _order(pair[1][0]))
    listed = sorted((row for _, each in fitting for row in each if _keeps(row, budget)), key=_order)[: options.top]
    assert best.plan is not None and best.program is not None
    if options.json:
        told = {"mesh": rows[0]["mesh"], "plan": str(best.plan).splitlines(), "notes": best.program.notes, "plans": listed}
        print(json.dumps(told, indent=1))
        return
    ranks = best.mesh.world_size
    where = f"{ranks} x {device.name}, {min(device.ranks_per_node, ranks)} a node, {bytes_text(budget)} each"
    weighed = sum(len(one.weighed) for one, _ in found)
    print(harmless(text(listed, f"{where}: {weighed} plans weighed on {len(found)} mesh{'es' * (len(found) > 1)}")))
    print(harmless(f"\nbest: {rows[0]['plan']} on mesh {rows[0]['mesh']}"))
    print(harmless("\n".join(f"  {line}" for line in str(best.plan).splitlines())))
    searched = [note for note in best.program.notes if "searched;" in note]
    print(harmless("\n".join(["notes", *(f"  {note}" for note in searched)])))


def _device(options: argparse.Namespace) -> Device:
    device = devices.named(options.device)
    if options.node is None:
        return device
    if options.node < 1:
        raise PlanError(f"--node {options.node}: a node has at least one device")
    return replace(device, ranks_per_node=options.node)


def _meshes(options: argparse.Namespace, device: Device) -> list[Mesh]:
    kind = "cpu" if device.name == "cpu" else "cuda"
    if options.mesh is not None:
        meshes = [Mesh(one, device=None if " on " in one else kind) for one in options.mesh]
        other = [mesh for mesh in meshes if options.devices not in (None, mesh.world_size)]
        if other:
            ranks = other[0].world_size
            raise PlanError(f"the mesh {other[0]} has {ranks} ranks, and --devices says {options.devices}: keep one of the two")
        return meshes
    if options.devices is None:
        raise PlanError("say how many devices there are, or which mesh\n  what to do: --devices 64, or --mesh dp=8,tp=8")
    if options.devices < 1:
        raise PlanError(f"--devices {options.devices}: at least one")
    return [Mesh.from_axes(axes, device=kind) for axes in factorizations(options.devices, device.ranks_per_node)]


def _progress(one: Planned, rows: list[Ranked]) -> str:
    mesh = Mesh.from_axes(one.mesh.axes)
    if rows:
        return f"{mesh}: {seconds_text(rows[0]['step_s'])} by {rows[0]['plan']}, after {one.seconds:.1f} s"
    return f"{mesh}: {str(one.refused).splitlines()[0]}"


def _order(row: Ranked) -> tuple[float, int]:
    """Of plans that take the same, those of fewer axes first."""
    return round(row["step_s"], 7), row["mesh"].count(",")


def _keeps(row: Ranked, budget: int) -> bool:
    return row["holds_bytes"] <= budget


def _nothing(found: list[tuple[Planned, list[Ranked]]]) -> PlanError:
    """The mesh on which least is held, and what it would take there."""
    refused = [one for one, _ in found if one.refused is not None]
    closest = min(refused, key=lambda one: _least(one.refused))
    lines = "\n".join(f"  {line}" for line in str(closest.refused).splitlines())
    return PlanError(f"none of {len(found)} meshes has a plan that fits; the closest is {Mesh.from_axes(closest.mesh.axes)}:\n{lines}")


def _least(error: MeshcError | None) -> float:
    if isinstance(error, DoesNotFit):
        return error.need.most.total
    return error.least or inf if isinstance(error, NothingFits) else inf
