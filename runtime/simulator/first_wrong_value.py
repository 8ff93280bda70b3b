"""Text of the first value of a program's ranks that is not the traced graph's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from meshc.errors import VerifyError
from meshc.ir import Record, record
from meshc.program.microbatch_split import MicrobatchSplit
from meshc.program.program import PlainProgram
from meshc.runtime.simulator.simulation import first_microbatch, node_values, simulate, whole
from meshc.runtime.simulator.tensor_error import FLOOR, error, peak_of


def first_wrong(
    program: PlainProgram, graph: Graph, values: Mapping[str, torch.Tensor], tolerance: float, parts: MicrobatchSplit | None = None
) -> str:
    """Text of the first per-rank value, in program order, that differs from the global-view graph's value on one device; empty if none.

    With `parts` the graph is one microbatch's, and the first microbatch is compared.
    """
    truth: dict[str, torch.Tensor] = {}
    mine = values
    if parts is not None:
        program = first_microbatch(program)
        inputs = {port.key: values[port.key] for port in program.inputs if port.kind == "input"}
        mine = {**values, **parts.microbatch_inputs(inputs, 0)}
    env = node_values(graph, (program.constants[port.name] if port.kind == "constant" else mine[port.key] for port in program.inputs))
    for node, made in env.items():
        if node.op != "call_function":
            continue
        truth.update({f"{node.name}.{index}": value for index, value in enumerate(made if isinstance(made, list | tuple) else [made])})
    wrong: list[str] = []

    def observe(node: Node, ranks: list[object]) -> None:
        found = node.meta.get("meshc")
        if wrong or not isinstance(found, Record) or found.sharding is None or found.sharding.partial or not found.of:
            return
        if found.used is not None:  # used rows are compared once they are back in their places
            return
        if "mb" in found.sharding.split_axes() or found.of not in truth:
            return
        wanted = truth[found.of]
        value = whole([tile for tile in ranks if isinstance(tile, torch.Tensor)], found.sharding, program)
        if not torch.is_floating_point(wanted):
            bad = not torch.equal(value, wanted)
        else:
            bad = error(value, wanted, FLOOR * peak_of(wanted)) > tolerance
        if bad:
            wrong.append(f"{node.name} = {getattr(node.target, '__name__', node.target)} at {record(node).source} ({found.sharding})")

    try:
        simulate(program, values, observe=observe)
    except VerifyError:
        pass
    return wrong[0] if wrong else ""
