"""Dump of the program as text after each pass, in numbered files that can be compared between runs.

    00_plan.txt           entries of the axes, the plan's other lines, notes
    01_capture.py ...     torch-level graph: calls as the model wrote them
    05_differentiate.py   global view: forward, backward and update in one graph, with the factors and shardings known so far
    12_partition.py ...   per-rank program: local shapes, collectives, and the reason for each collective

The text contains no times, addresses or ids; a dump changes nothing of the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from meshc import ir
from meshc.files.folders import write_text, writing
from meshc.frontend.sources import source_of
from meshc.ir import Record, spmd
from meshc.ir.functions import Target
from meshc.ir.graph import placeholders
from meshc.ir.sharding import Sharding
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.factors import Value
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.plan.recipes import explain
from meshc.program.program import Stage
from meshc.text.printer import print_program, print_stage, print_type, value_names

Lies = Callable[[Value, Record], Sharding | None]
"""Sharding of a value, None if it is not known yet."""

PLAN = "00_plan.txt"


def dumper(path: str | Path) -> Hook:
    """Hook for one compilation: writes `NN_pass.py` after each pass, and `00_plan.txt` anew.

    Only rank 0 writes. Files of an earlier dump in the folder are removed first.
    """
    folder = Path(path)
    done: list[str] = []

    def write(name: str, phase: CompilationPhase) -> None:
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        if not done:
            _clear(folder)
        done.append(name)
        write_text(folder / f"{len(done):02}_{name}.py", phase_text(name, phase), lasting=False)
        write_text(folder / PLAN, plan_text(phase), lasting=False)

    return write


def _clear(folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PLAN).is_file():
            for old in folder.iterdir():
                if re.fullmatch(r"\d\d_\w+\.py", old.name):
                    old.unlink()


def plan_text(phase: CompilationPhase) -> str:
    """Text of the mesh, the plan with the origin of each axis's entry, the number of microbatches, and the notes so far."""
    lines = [f"mesh {phase.mesh}", "", explain(phase.plan, phase.mesh)]
    if phase.request.count > 1:
        lines.append(f"{phase.request.count} microbatches")
    if phase.notes:
        lines += ["", "notes", *(f"  {note}" for note in phase.notes)]
    return "\n".join(lines) + "\n"


def phase_text(name: str, phase: CompilationPhase) -> str:
    """Text of a phase after the pass `name`: torch-level graph, global view, or per-rank program."""
    if isinstance(phase, LoweredProgram):
        count = sum(spmd.is_collective(node.target) for stage in phase.stages.values() for node in stage.graph.nodes)
        head = f"# after {name}: what each of {phase.mesh.world_size} ranks runs, {count} collectives"
        return f"{head}\n\n{print_program(phase.as_program())}"
    if isinstance(phase, PlacedModel):
        return _global_text(name, phase.joint, partial(_sharding, phase), phase.assignment.reasons if phase.assignment is not None else {})
    assert isinstance(phase, TracedModel)
    if phase.joint is not None:
        return _global_text(name, phase.joint, lambda value, found: None, {})
    graph = phase.model.module.graph
    return f"# after {name}: the model's graph as torch traced it, {_count(graph)} values\n\n{torch_text(graph)}"


def _count(graph: Graph) -> int:
    return sum(node.op not in ("placeholder", "output") for node in graph.nodes)


def _global_text(name: str, joint: Joint, lies: Lies, reasons: Mapping[Node, str]) -> str:
    return f"# after {name}: the global view, {_count(joint.graph)} values\n\n{print_stage(global_view(joint, lies, reasons))}"


def global_view(joint: Joint, lies: Lies, reasons: Mapping[Node, str]) -> Stage:
    """Stage with a copy of the global view; its records have the factors, shardings and reasons known so far."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(joint.graph, copies))
    ports = dict(zip(placeholders(joint.graph), joint.inputs, strict=True))
    for node, made in copies.items():
        if not ir.has_record(node):
            continue
        stored = ports[node].sharding if node in ports else None
        known = tuple(
            replace(found, sharding=stored or lies(value, found), reason=found.reason or reasons.get(node, ""))
            for found, value in zip(ir.records(node), _values(node), strict=True)
        )
        ir.set_record(made, known if isinstance(node.meta[ir.KEY], tuple) else known[0])
    return Stage("main", graph, tuple(port.key for port in joint.inputs), tuple(port.key for port in joint.outputs))


def _values(node: Node) -> list[tuple[Node, int]]:
    return [ir.value_of(node)] if ir.is_getitem(node) else [(node, index) for index in range(len(ir.records(node)))]


def _sharding(placed: PlacedModel, value: Value, found: Record) -> Sharding | None:
    """Sharding of a value; without an assignment, its factors unsplit."""
    if found.dtype is None or value not in placed.factors.dims:
        return None
    given = None if placed.assignment is None else placed.assignment.given.get(value)
    if given is not None:
        return given
    return placed.names.whole_sharding(placed.factors, value)


# Text of the torch-level graph, before differentiate.


def torch_text(graph: Graph) -> str:
    """Text of a torch-level graph: one call a line, with the type of its value and its source. It cannot be parsed back."""
    names = value_names(graph)
    arguments = [f"    {names[node]}{_type(node)}," for node in placeholders(graph)]
    lines = ["def model(", *arguments, "):"] if arguments else ["def model():"]
    above = ("", 0)
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"    return {_argument(node.args[0], names)}")
            continue
        source = source_of(node)
        place = (source.file, source.line)
        if source.code and place != above:
            lines.append(f"    # {source.code}")
        above = place
        lines.append(f"    {names[node]}{_type(node)} = {_call(node, names)}{f'  # {source}' if str(source) else ''}")
    return "\n".join(lines) + "\n"


def _type(node: Node) -> str:
    value = node.meta.get("example_value", node.meta.get("val"))
    if not isinstance(value, torch.Tensor):
        return ""
    return f': "{print_type(Record(tuple(map(int, value.shape)), value.dtype))}"'


def _call(node: Node, names: dict[Node, str]) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    arguments = [_argument(value, names) for value in node.args]
    if node.op == "call_method":
        receiver, *arguments = arguments
        function = f"{receiver}.{node.target}"
    elif node.op == "call_module":
        function = f"self.{node.target}"
    else:
        function = _function(node.target)
    arguments += [f"{name}={_argument(value, names)}" for name, value in node.kwargs.items()]
    return f"{function}({', '.join(arguments)})"


def _function(target: Target) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops.{str(target).removesuffix('.default')}"
    module = (getattr(target, "__module__", None) or "torch").removeprefix("_").replace("torch._C._nn", "torch.nn.functional")
    return f"{module}.{getattr(target, '__name__', type(target).__name__)}"


def _argument(value: object, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, list):
        return f"[{', '.join(_argument(item, names) for item in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(_argument(item, names) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_argument(item, names)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({', '.join(_argument(item, names) for item in (value.start, value.stop, value.step))})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
