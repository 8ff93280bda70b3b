"""Specialisation of a trace with symbolic sizes to actual ones: the graph that tracing at these sizes would give.

    view = aten.reshape(x, [n_batch * n_seq, 64])      at batch 8, seq 48      view = aten.reshape(x, [384, 64])

What tracing assumed about the sizes (ranges, and constraints such as `n_seq % 4 == 0`) must hold; then, by torch's guards, the model does
the same. Passes that need sizes as numbers run after this: no symbol is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshc.errors import InputError
from meshc.ir.sizes import PREFIX
from meshc.passes.phases.request import Request
from meshc.passes.phases.traced_model import Joint, TracedModel
from meshc.program.instance import holds, substitute_in_graph, substitute_in_ports


class NotServed(Exception):
    """Sizes for which the trace may not hold."""


def substitute_in_joint(joint: Joint, values: Mapping[str, int]) -> Joint:
    inputs, outputs = (substitute_in_ports(ports, values) for ports in (joint.inputs, joint.outputs))
    return replace(joint, graph=substitute_in_graph(joint.graph, values), inputs=inputs, outputs=outputs)


def put_sizes(traced: TracedModel, request: Request, sizes: Mapping[str, int]) -> TracedModel:
    """The trace at these sizes, by name, for a request whose inputs have them, with an independent graph. Raises NotServed."""
    joint, values = traced.operators(), {PREFIX + name: size for name, size in sizes.items()}
    for size in traced.dynamic:
        if not size.low <= sizes[size.name] <= size.high:
            raise NotServed(f"{size.name} is {sizes[size.name]}, and the trace is for {size}")
    for text in traced.constraints:
        if not holds(text, values):
            raise NotServed(f"{text} does not hold")
    tree = traced.model.output_tree
    if any(isinstance(leaf, int | float) and type(leaf) not in (int, float, bool) for leaf in tree.plain.values()):
        raise NotServed("its output holds a size")
    try:
        put = substitute_in_joint(joint, values)
    except InputError as error:
        raise NotServed(str(error)) from error
    return replace(traced.with_request(request), model=replace(traced.model, symbols=None), joint=put, dynamic=(), constraints=())
