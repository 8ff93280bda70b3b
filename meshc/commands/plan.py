"""`meshc plan`: the fastest meshes and plans of a model for a number of devices, found without the devices."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from meshc.api.planning import Planner, PlanResult
from meshc.commands.target import add_grad, add_keeping, harmless, keeping, keeping_words, load_target, read_plan
from meshc.cost import devices
from meshc.cost.devices import Device
from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.ir.quantities import read_bytes
from meshc.options import Options
from meshc.passes.driver.search_errors import NoFasterPlan, NothingFits, rank_multiple, rounded_size_text
from meshc.plan.factorizations import factorizations
from meshc.plan.plan import file_to_write
from meshc.report.plan_ranking import EstimatedPlan, RankedPlan, estimated_plans, expected_text, ideal_seconds, rank_plans, text
from meshc.report.tables import bytes_text, seconds_text, table


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="FILE.py:FUNCTION", help="returns the model and example inputs; tensors on meta will do")
    command.add_argument("--devices", metavar="N", type=int, help="how many there are; several meshes of them are tried")
    command.add_argument("--mesh", metavar="AXES", nargs="+", help="these meshes and no others: dp=8,tp=8; the last axis is the innermost")
    command.add_argument("--device", metavar="NAME", default="h100", help=f"what they are: {', '.join(devices.names())}; default: h100")
    command.add_argument("--node", metavar="N", type=int, help="how many share the fast links of a node; default: the device's")
    command.add_argument("--memory", metavar="SIZE", help="what a rank may hold, as 80GB or 40 GiB; default: the device's memory")
    command.add_argument("--plan", default="auto", help="what is given of the plan: lines such as `dp: batch` or `tp: auto`; default: auto")
    add_keeping(command)
    command.add_argument("--top", metavar="N", type=int, default=5, help="how many plans are listed; default: 5")
    command.add_argument("--save-plan", metavar="FILE.plan", help="write the best plan as text, for `meshc compile --plan` on its mesh")
    command.add_argument("--json", action="store_true", help="the list, and the plan that is taken, as JSON")
    add_grad(command, "planned")


@dataclass(frozen=True)
class MeshCandidate:
    """A mesh that was looked into, and its plans that keep the budget, the fastest first; `others`: what was estimated and not made."""

    found: PlanResult
    rows: list[RankedPlan]
    others: list[EstimatedPlan]

    @property
    def mesh(self) -> str:
        return str(Mesh.from_axes(self.found.mesh.axes))

    @property
    def why(self) -> str:
        """The reason why the mesh has no plan."""
        least = _least(self.found)
        if least < inf:
            return f"nothing fits; the least that a plan was found to hold is {rounded_size_text(least)}"
        return str(self.found.refused).splitlines()[0]


def run(options: argparse.Namespace) -> None:
    if options.top < 1:
        raise PlanError(f"--top {options.top}: at least one plan is listed")
    device = _device(options)
    plan_file = None if options.save_plan is None else file_to_write(options.save_plan)
    budget = int(device.memory_bytes) if options.memory is None else read_bytes(options.memory, "--memory")
    meshes = _meshes(options, device)
    what, args, kwargs = load_target(options.target)
    looked = _look(options, Planner(what, args, kwargs, options.grad), meshes, device, budget)
    fitting = [one for one in looked if one.rows]
    if not fitting:
        raise _nothing(looked, budget, meshes[0].world_size)
    best = min(fitting, key=lambda one: _order(one.rows[0]))
    listed = sorted((row for one in fitting for row in one.rows), key=_order)[: options.top]
    slower = (row for one in looked for row in one.others if row["about_s"] > best.rows[0]["step_s"])
    others = sorted(slower, key=lambda row: row["about_s"])[: options.top - len(listed)]
    if plan_file is not None:
        assert best.found.plan is not None
        best.found.plan.save(plan_file)
    if options.json:
        print(json.dumps(_result_json(best, listed, others, looked), indent=1))
        return
    ranks = best.found.mesh.world_size
    where = f"{ranks} x {device.name}, {min(device.ranks_per_node, ranks)} a node, {bytes_text(budget)} each"
    lines = _result_lines(best, listed, others, looked, where)
    if plan_file is not None:
        lines.append(f"saved to {plan_file}; compile it with\n  {_compile_command(options, best, plan_file)}")
    print(harmless("\n".join(lines)))


def _look(options: argparse.Namespace, planner: Planner, meshes: Sequence[Mesh], device: Device, budget: int) -> list[MeshCandidate]:
    """Meshes of so many devices are looked into as long as they may have a faster plan than those before; those that are named, all."""
    looked: list[MeshCandidate] = []
    known = inf
    asked = Options(memory_budget=budget, training=keeping(options))
    for mesh in meshes:
        start, beaten = time.process_time(), None if options.mesh is not None or known == inf else known
        found = planner.on(mesh, read_plan(options.plan), device=device, options=asked, beaten_s=beaten)
        ideal = None if found.program is None else ideal_seconds(found.program, device)
        name = str(Mesh.from_axes(mesh.axes))
        rows = rank_plans(name, found.weighed, ideal) if found.refused is None else []
        others = estimated_plans(name, found.weighed, budget)
        looked.append(MeshCandidate(found, [row for row in rows if row["holds_bytes"] <= budget], others))
        known = min([known, *(row["step_s"] for row in looked[-1].rows)])
        print(harmless(_progress(looked[-1], time.process_time() - start)), file=sys.stderr, flush=True)
    return looked


def _progress(one: MeshCandidate, seconds: float) -> str:
    said = f"{seconds_text(one.rows[0]['step_s'])} by {one.rows[0]['plan']}" if one.rows else one.why
    return f"{one.mesh}: {said}; {seconds:.1f} s"


# --------------------------------------------------------------------------------------------------------------------------- what is said


def _result_lines(
    best: MeshCandidate, listed: list[RankedPlan], others: list[EstimatedPlan], looked: list[MeshCandidate], where: str
) -> list[str]:
    weighed = sum(len(one.found.weighed) for one in looked)
    lines = [text(listed, f"{where}: {weighed} plans weighed on {len(looked)} mesh{'es' * (len(looked) > 1)}"), ""]
    if others:
        lines += [expected_text(others, "next by the planner's model, and not made"), ""]
    without = [one for one in looked if not one.rows]
    if without:
        rows = [
            (one.mesh, one.why.partition("; a plan of")[0] if isinstance(one.found.refused, NoFasterPlan) else one.why) for one in without
        ]
        lines += [table(rows, ["mesh", "why it has none"], "meshes without a plan that fits and could be faster"), ""]
    assert best.found.program is not None
    lines.append(f"best: {best.rows[0]['plan']} on mesh {best.mesh}")
    lines += [f"  {line}" for line in str(best.found.plan).splitlines()]
    searched = [note for note in best.found.program.notes if "searched;" in note]
    return [*lines, *(["notes", *(f"  {note}" for note in searched)] if searched else [])]


def _compile_command(options: argparse.Namespace, best: MeshCandidate, plan: Path) -> str:
    words = [options.target, "--mesh", str(best.found.mesh), "--plan", str(plan), *keeping_words(options)]
    words += ["--grad"] if options.grad else []
    return shlex.join(["python", "-m", "meshc", "compile", *words])


def _result_json(
    best: MeshCandidate, listed: list[RankedPlan], others: list[EstimatedPlan], looked: list[MeshCandidate]
) -> dict[str, object]:
    assert best.found.program is not None
    without = [
        {"mesh": one.mesh, "why": one.why, "at_best_s": one.found.refused.least_s if isinstance(one.found.refused, NoFasterPlan) else None}
        for one in looked if not one.rows
    ]  # fmt: skip
    return {
        "mesh": best.mesh, "plan": str(best.found.plan).splitlines(), "notes": best.found.program.notes, "plans": listed,
        "estimated": others, "without": without,
    }  # fmt: skip


def _order(row: RankedPlan) -> tuple[float, int]:
    """Sort key of plans: time, then number of axes."""
    return round(row["step_s"], 7), row["mesh"].count(",")


def _nothing(looked: list[MeshCandidate], budget: int, ranks: int) -> PlanError:
    """The mesh on which least is held, and what it would take there, the cheapest change first."""
    closest = min(looked, key=lambda one: _least(one.found))
    error, least = closest.found.refused, _least(closest.found)
    error = error.with_changes_tried() if isinstance(error, NothingFits) else error
    many = f"none of {len(looked)} meshes has" if len(looked) > 1 else f"the mesh {closest.mesh} does not have"
    if least == inf:
        lines = "\n".join(f"  {line}" for line in str(error).splitlines())
        return PlanError(f"{many} a plan; of {closest.mesh}:\n{lines}")
    held = f"; the least that one was found to hold is {rounded_size_text(least)} a rank, on {closest.mesh}"
    parts, changes, plan = "", [], ""
    if isinstance(error, NothingFits) and (refused := error.refused) is not None:
        parts, changes, plan = refused.parts, refused.change_texts(error.found)[:1], refused.plan_text(error.found)
    advice = [
        *changes, f"--memory {rounded_size_text(least)}, where a device has that",
        f"about {rank_multiple(budget, least) * ranks} devices, if they split what is held", "smaller inputs, or checkpointed layers",
    ]  # fmt: skip
    lines = "".join(f"\n  {line}" for line in ([parts] if parts else []))
    return PlanError(
        f"{many} a plan that fits {rounded_size_text(budget)}{held}{':' if parts else ''}{lines}\n"
        f"  what to do: {'; or '.join(advice)}{plan}"
    )


def _least(found: PlanResult) -> float:
    error = found.refused
    return error.least or inf if isinstance(error, NothingFits) else inf


# --------------------------------------------------------------------------------------------------------------------------- what is asked


def _device(options: argparse.Namespace) -> Device:
    device = devices.find_device(options.device)
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
