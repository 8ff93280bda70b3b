"""What a rank keeps in memory, by a liveness walk over the program that it runs.

A value lives from the operator that makes it to the last that reads it, or to the end of the call if another stage reads it. Views
share the storage of what they look at. Parameters, buffers and optimizer state live for ever, and are counted apart; what a kernel needs
while it runs is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from meshc import ir, packing
from meshc.program import Port, Program, Stage
from meshc.sharding import local_shape

KEPT = ("parameter", "state", "buffer", "constant", "input")
"""Kinds of ports that are there for the whole call."""


@dataclass(frozen=True)
class Peak:
    """The largest number of bytes that values made by the program hold at once on a rank, gradients of parameters among them, and where."""

    total: int = 0
    gradients: int = 0
    at: str = ""


def port_bytes(port: Port, sizes: Mapping[str, int]) -> int:
    """Bytes on each rank, padding included."""
    shape = port.shape if port.sharding is None else local_shape(port.sharding, sizes)
    return prod(shape) * port.dtype.itemsize


def real_bytes(port: Port, sizes: Mapping[str, int]) -> float:
    """Bytes on a rank that are no padding, on average."""
    tiles = 1 if port.sharding is None else prod(sizes[axis] for axis in port.sharding.split_axes())
    return prod(port.shape) * port.dtype.itemsize / tiles


def runs(program: Program) -> Counter[str]:
    """How often a call of the program runs each stage."""
    return Counter(instruction.stage for instruction in program.schedule if instruction.op == "run")


def updates(node: Node) -> Iterator[tuple[Node, Node]]:
    """(parameter, gradient) of each parameter that an optimizer's operator updates."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "meshc":
        return
    arguments = [argument.name for argument in node.target._schema.arguments[:2]]
    if arguments == ["params", "grads"]:
        yield from zip(node.args[0], node.args[1], strict=True)  # type: ignore[arg-type]
    elif arguments == ["param", "grad"]:
        yield node.args[0], node.args[1]  # type: ignore[misc]


def output_bytes(stage: Stage) -> dict[str, int]:
    """Bytes of each tensor that a stage gives, by key, whatever storage it shares."""
    (output,) = stage.graph.find_nodes(op="output")
    given = zip(stage.outputs, output.args[0], strict=True)
    return {key: ir.local_bytes(ir.record(value)) for key, value in given if isinstance(value, Node) and ir.is_tensor(value)}


def peak(program: Program) -> Peak:
    """The peak over one call."""
    best = Peak()
    carried: dict[str, int] = {}  # bytes of values that wait between stages, by key
    made = {key: size for stage in program.stages.values() for key, size in output_bytes(stage).items()}
    walked: dict[str, tuple[Peak, dict[str, int]]] = {}
    for instruction in program.schedule:
        if instruction.op == "run":
            stage = program.stages[instruction.stage]
            if stage.name not in walked:
                walked[stage.name] = _walk(stage)
            inside, leaves = walked[stage.name]
            waiting = sum(carried.values())
            if waiting + inside.total > best.total:
                grown = sum(size for key, size in carried.items() if key.startswith(("gradient:", "sum:")))
                best = Peak(waiting + inside.total, inside.gradients + grown, inside.at)
            carried.update(leaves)
        elif instruction.op == "add":
            carried.pop(instruction.value, None)
            carried[instruction.into] = made[instruction.value]  # a sum of its own, also of a part that shared a larger storage
    return best


def _walk(stage: Stage) -> tuple[Peak, dict[str, int]]:
    """The peak inside a stage, and the bytes of each value that it makes and another may read."""
    nodes = list(stage.graph.nodes)
    home: dict[Node, Node] = {}  # the node that made a value's storage
    size: dict[Node, int] = {}
    last: dict[Node, int] = {}
    gradients = {gradient for node in nodes for _, gradient in updates(node)}
    results: dict[Node, list[str]] = {}
    inside = packing.pieces(stage.graph)
    joined = {piece.whole for piece in inside.values()}
    first: dict[Node, Node] = {}  # the first value made in the memory of each
    for position, node in enumerate(nodes):
        last[node] = position
        if node.op == "output":
            for key, value in zip(stage.outputs, node.args[0], strict=True):
                if isinstance(value, Node):
                    results.setdefault(home[value], []).append(key)
                    last[home[value]] = position
                    if key.startswith("gradient:"):
                        gradients.add(value)
            continue
        whole = inside[node].whole if node in inside else node
        if whole in joined:
            home[node] = first.setdefault(whole, node)
        else:
            home[node] = home[node.all_input_nodes[0]] if packing.is_view(node) or packing.in_place(node) else node
        if home[node] is node:
            made = node.op == "call_function" and ir.has_record(node)
            size[node] = sum(map(ir.local_bytes, ir.records(whole))) if made else 0
        for operand in node.all_input_nodes:
            last[home[operand]] = position
    grown = {home[node] for node in gradients if node in home}
    alive = growing = 0
    kept = [node for whole, node in first.items() if not packing.escapes(whole)]
    for node in [*kept, *(node for node in nodes if packing.stays(node))]:
        if node in size:  # the runtime has it for good
            growing += size[node] if node in grown else 0
            alive += size.pop(node)
    dying: dict[int, list[Node]] = {}
    for node in size:
        dying.setdefault(last[node], []).append(node)
    best = Peak()
    for position, node in enumerate(nodes):
        if node in size:
            alive += size[node]
            growing += size[node] if node in grown else 0
        if alive > best.total:
            best = Peak(alive, growing, _place(stage, node))
        for dead in dying.get(position, ()):
            alive -= size[dead]
            growing -= size[dead] if dead in grown else 0
    return best, {names[0]: size[node] for node, names in results.items() if size.get(node)}


def _place(stage: Stage, node: Node) -> str:
    found = ir.records(node)[0].source if ir.has_record(node) and ir.records(node) else None
    where = f" at {found}" if found is not None and str(found) else ""
    return f"{node.name}{where}" + (f", stage {stage.name}" if stage.name != "main" else "")
