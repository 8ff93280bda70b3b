"""Where a program's inputs lie and its outputs are left: parameters and state as they are stored, outputs as the caller wants them."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from meshc.ir import value_of
from meshc.ir.graph import placeholders
from meshc.ir.keys import is_a
from meshc.ir.sharding import Sharding
from meshc.ir.spmd import MICROBATCH
from meshc.passes.phases.draft import Draft
from meshc.passes.phases.factors import Value
from meshc.passes.place.propagate import Propagator
from meshc.passes.place.stored_updates import state_storage
from meshc.program.program import Port


def lay_ports(draft: Draft, propagator: Propagator) -> None:
    """Gives each port its sharding, from what propagation has decided."""
    draft.inputs = [replace(port, sharding=_lies(propagator, port, node)) for port, node in zip(draft.inputs, _nodes(draft), strict=True)]
    draft.outputs = [
        replace(port, sharding=_leaves(propagator, draft, port, node)) for port, node in zip(draft.outputs, draft.results(), strict=True)
    ]
    if draft.request.inputs == "local":
        _tangents_as_outputs(draft)


def _tangents_as_outputs(draft: Draft) -> None:
    """With local inputs an output is a rank's part of the batch, and so is the gradient that comes back for it; likewise for inputs."""
    outputs = {port.name: port.sharding for port in draft.outputs if port.kind == "output"}
    inputs = {port.key: port.sharding for port in draft.inputs if port.kind == "input"}
    draft.inputs = [replace(port, sharding=outputs[port.name]) if port.kind == "tangent" else port for port in draft.inputs]
    draft.outputs = [
        replace(port, sharding=inputs[port.name]) if port.kind == "gradient" and port.name in inputs else port for port in draft.outputs
    ]


def _nodes(draft: Draft) -> list[Node]:
    return placeholders(draft.the_graph())


def _lies(propagator: Propagator, port: Port, node: Node) -> Sharding:
    whole = propagator.result.whole((node, 0))
    if port.kind == "parameter":
        return propagator.storage(port.name, "parameter")
    if port.kind == "state":
        dims, parameter = propagator.factors.dims, propagator.parameter(port.of)
        return state_storage(whole, dims[(node, 0)], propagator.storage(port.of, "state"), dims[(parameter, 0)])
    if port.kind == "input":
        return propagator.given((node, 0)) or whole
    return whole


def _leaves(propagator: Propagator, draft: Draft, port: Port, node: Node) -> Sharding:
    value = value_of(node)
    whole = propagator.result.whole(value)
    if port.kind in ("parameter", "state"):
        like = next((p for p in draft.inputs if p.key == port.key), None)
        return like.sharding if like is not None and like.sharding is not None else whole
    if port.kind == "gradient" and not is_a(port.name, "input"):
        return propagator.storage(port.name, "gradient")
    if port.kind == "metric" and len(whole.dims) > 0:
        given = propagator.given(value) if MICROBATCH in draft.sizes else None
        local = draft.request.inputs == "local"
        return _batch_only(propagator, value, whole, given) if given is not None or local else whole
    if port.kind == "output":
        given = propagator.given(value)
        if port.name in draft.cache_outputs or draft.request.outputs == "dtensor":
            return _known(given, whole)
        if MICROBATCH in draft.sizes and not draft.request.train and given is not None:
            return _batch_only(propagator, value, whole, given)  # a microbatch gives its rows
        if draft.request.inputs == "local":
            return _batch_only(propagator, value, whole, None)
    return whole


def _known(given: Sharding | None, whole: Sharding) -> Sharding:
    return whole if given is None else given.without_pending()


def _batch_only(propagator: Propagator, value: Value, whole: Sharding, given: Sharding | None) -> Sharding:
    """Split along batch alone: as it is given, or over the data axes."""
    for dim, row in enumerate(propagator.factors.dims[value]):
        for position, factor in enumerate(row):
            if "batch" in propagator.names.also[factor]:
                axes = propagator.local_batch if given is None else given.dims[dim][position].axes
                return whole.with_axes(dim, position, axes)
    return whole
