"""Shardings of a program's ports: parameters and state as stored, inputs and outputs as the caller passes and wants them.

    parameter:w  f32[ffn 32, hidden 8]      becomes      parameter:w  f32[ffn 32/tp, hidden 8]
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from meshc.ir import value_of
from meshc.ir.graph import placeholders
from meshc.ir.keys import is_a, key_of
from meshc.ir.sharding import Sharding
from meshc.ir.spmd import MICROBATCH
from meshc.optimizer.spec import MASK, PART_ERRORS, SUM_ERROR
from meshc.passes.phases.factors import Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.traced_model import CompressionSide
from meshc.passes.place.compression_sides import error_storage, parts_factors, rows_of_ranks
from meshc.passes.place.propagate import batch_place
from meshc.passes.place.stored_updates import state_storage
from meshc.program.program import Port


def lay_ports(placed: PlacedModel) -> PlacedModel:
    """Sets each port's sharding, from the decisions of propagation."""
    joint = placed.joint
    inputs = [
        replace(port, sharding=_input_sharding(placed, port, node))
        for port, node in zip(joint.inputs, placeholders(joint.graph), strict=True)
    ]
    stored = {port.key: port.sharding for port in inputs}
    outputs = [
        replace(
            port, sharding=stored.get(port.key) if port.kind in ("parameter", "state") else _output_sharding(placed, port, value_of(node))
        )
        for port, node in zip(joint.outputs, joint.results(), strict=True)
    ]
    if placed.request.inputs == "local":
        # an output is a rank's part of the batch, and so is its tangent; likewise a gradient and its input
        left = {port.name: port.sharding for port in outputs if port.kind == "output"}
        inputs = [replace(port, sharding=left[port.name]) if port.kind == "tangent" else port for port in inputs]
        outputs = [
            replace(port, sharding=stored[port.name]) if port.kind == "gradient" and is_a(port.name, "input") else port for port in outputs
        ]
    return replace(placed, joint=replace(joint, inputs=tuple(inputs), outputs=tuple(outputs)))


def _input_sharding(placed: PlacedModel, port: Port, node: Node) -> Sharding:
    decided = placed.require_assignment()
    whole = decided.whole((node, 0))
    if port.kind == "parameter":
        return decided.storage[port.name, "parameter"]
    if port.kind == "state" and (slot := port.name.removeprefix(f"{port.of}/")) in (PART_ERRORS, SUM_ERROR):
        side = CompressionSide(placed.plan.gradient_compressions[0].axis, home=slot == SUM_ERROR)
        return error_storage(whole, decided.storage[port.of, "state"], side, placed.sizes)
    if port.kind == "state":
        stored = "parameter" if port.name == f"{port.of}/{MASK}" else "state"
        dims, parameter = placed.factors.dims, placed.joint.placeholders()[key_of("parameter", port.of)]
        return state_storage(whole, dims[node, 0], decided.storage[port.of, stored], dims[parameter, 0])
    if port.kind == "input":
        return decided.given.get((node, 0)) or whole
    return whole


def _output_sharding(placed: PlacedModel, port: Port, value: Value) -> Sharding:
    decided, request = placed.require_assignment(), placed.request
    whole = decided.whole(value)
    if port.kind == "gradient" and not is_a(port.name, "input"):
        return decided.storage[port.name, "gradient"]
    given = decided.given.get(value)
    if port.kind == "output" and (port.name in placed.traced.model.output_tree.caches() or request.outputs == "dtensor"):
        return whole if given is None else given.without_partial()
    if port.kind == "metric" and whole.dims or port.kind == "output":
        if MICROBATCH not in placed.sizes or port.kind == "output" and request.train:
            given = None  # else a microbatch gives its rows
        place = batch_place(placed.names, placed.factors.dims[value])
        if place is not None and (given is not None or request.inputs == "local"):
            dims, parts = placed.factors.dims[value], parts_factors(placed.joint, placed.factors)
            axes = placed.local_batch if given is None else tuple(axis for part in given.dims[place[0]] for axis in part.axes)
            return rows_of_ranks(whole, place, axes, dims[place[0]], parts) if parts else whole.with_axes(
                *place, placed.local_batch if given is None else given.dims[place[0]][place[1]].axes
            )
    return whole
