"""Parameters and state stored on the host, in a graph: copies to the device before readers, and copies of results back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import Graph, Node

from meshc.ir import record, spmd
from meshc.ir.graph import call, output_of, results_of, set_results
from meshc.ir.storage_moves import Storage
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.plan.memory_lines import OffloadLine
from meshc.program.program import Port


def line_of(lines: Sequence[OffloadLine], port: Port) -> OffloadLine | None:
    """The first line about the parameter of `port`, or about the parameter that `port` is state of."""
    return next((line for line in lines if line.names(port.of or port.name)), None)


def mark_on_host(lowered: LoweredProgram, storages: Mapping[str, Storage]) -> LoweredProgram:
    """`lowered` with `storages` recorded in the ports, by key."""
    inputs, outputs = (
        tuple(replace(port, storage=storages.get(port.key, port.storage)) for port in ports)
        for ports in (lowered.inputs, lowered.outputs)
    )
    return replace(lowered, inputs=inputs, outputs=outputs)


def fetch(graph: Graph, node: Node, first: Node, readers: Sequence[Node], phase: str, why: str) -> Node:
    """A copy on the device of `node`, which is stored on the host, made before `first`; `readers` read the copy."""
    with graph.inserting_before(first):
        made = replace(record(node), storage="device", phase=phase, reason=why)
        here = call(graph, made, spmd.from_host, node)
    for reader in readers:
        reader.replace_input_with(node, here)
    return here


def put_back(graph: Graph, position: int, place: Node, why: str) -> None:
    """In place: copies the result at `position`, the updated `place`, back into the storage of `place`."""
    end = output_of(graph)
    results = list(results_of(graph))
    with graph.inserting_before(end):
        made = replace(record(results[position]), storage=record(place).storage, phase="update", reason=why)
        results[position] = call(graph, made, spmd.to_host, results[position], place)
    set_results(graph, results)
