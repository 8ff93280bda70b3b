"""Raise: calls of the torch-level graph that are worth keeping whole, as `meshc::` operators.

    attn = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=m)
    loss = torch.nn.functional.cross_entropy(x, t)          y = torch.nn.functional.dropout(h, 0.1, True)
  becomes
    attn = sdpa(q, k, v, attn_mask=m)
    loss = cross_entropy(x, t)                              y = dropout(h, seed_step, 0, 0.1)

Runs before AOTAutograd, so each composite has one node forward and one backward; afterwards, every backend's variant would have to be
recognised. Random calls get their number first (`number_random_calls.py`). Assumes that `capture` inlined modules.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from meshc.frontend.capture import TorchGraph
from meshc.frontend.sources import source_of
from meshc.ir.functions import Function, Target
from meshc.ops import grouped_mm, recurrent
from meshc.ops.as_strided import as_strided, fill_diagonal
from meshc.ops.bags import embedding_bag
from meshc.ops.multi_head import multi_head_attention
from meshc.ops.sdpa import sdpa
from meshc.ops.signatures import bind_arguments
from meshc.ops.take import cross_entropy, raised_one_hot
from meshc.ops.upsample import interpolate
from meshc.passes.phases.traced_model import TracedModel
from meshc.passes.trace.chains import READ
from meshc.passes.trace.number_random_calls import number_random_calls
from meshc.passes.trace.own_results import own_result
from meshc.passes.trace.raise_flex import FLEX, raise_flex
from meshc.passes.trace.raise_masked_writes import raise_masked_writes
from meshc.passes.trace.raise_sinks import raise_sinks
from meshc.passes.trace.raise_written_out import raise_written_out
from meshc.passes.trace.stand_ins import StandIns, read_by_place
from meshc.passes.trace.transformed_calls import ATTENTION, write_out_attention
from meshc.private import OpOverload

functional = torch.nn.functional
COMPOSITES: dict[Target, Function] = {
    functional.scaled_dot_product_attention: sdpa,
    functional.cross_entropy: cross_entropy,
    functional.embedding_bag: embedding_bag,
    functional.one_hot: raised_one_hot,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.interpolate: interpolate,
    torch.as_strided: as_strided,
    "as_strided": as_strided,
    "fill_diagonal_": fill_diagonal,
    **grouped_mm.RAISED,
    **recurrent.RAISED,
}
ALIASES = (as_strided, fill_diagonal)
"""Functions whose result shares memory with an operand: a view that is written through, and a write in place."""
SPARSE: dict[Target, str] = {
    functional.embedding: "sparse",
    torch.embedding: "sparse",
    functional.embedding_bag: "sparse",
    torch.gather: "sparse_grad",
    "gather": "sparse_grad",
}
"""Calls that can return a sparse gradient -> the argument that requests it. A program's gradients are dense, and equal."""


def raise_ops(traced: TracedModel) -> TracedModel:
    """Replaces the model's calls."""
    return replace(traced, model=raise_graph(traced.model))


def raise_graph(model: TorchGraph) -> TorchGraph:
    """The same for any torch-level graph, in place."""
    stand_ins = StandIns(model)
    for node in model.module.graph.nodes:
        if node.kwargs and node.target in READ:
            read_by_place(node)
    model = number_random_calls(model, stand_ins)
    module, notes = model.module, list[str]()
    raise_sinks(module, stand_ins)
    raise_written_out(module, stand_ins)
    raise_masked_writes(module)
    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "call_method"):
            continue
        if node.target is FLEX:
            raise_flex(module, node)
            stand_ins.compare(node)
            continue
        if node.target in SPARSE:
            notes += _dense(node)
        if node in stand_ins.transformed_nodes:
            if node.target in ATTENTION:
                write_out_attention(node)
            continue
        composite = _composite(node.target)
        if composite is not None:
            stand_ins.replace_call(node, composite)
            if composite not in ALIASES:
                own_result(node)
    module.recompile()
    return replace(model, notes=(*model.notes, *notes))


def _dense(node: Node) -> list[str]:
    """Removes the request of a sparse gradient; returns a note."""
    name = SPARSE[node.target]
    named = bind_arguments(node.target, node.args, node.kwargs)
    if not named.get(name):
        return []
    first, *rest = (each for each in named if each != name)
    node.args, node.kwargs = (named[first],), {each: named[each] for each in rest}
    return [f"{source_of(node)}: {name}=True asks for a sparse gradient, which is dense in a program, and equal"]


def _composite(target: Target) -> Function | None:
    """The function that replaces a target; None if there is none."""
    name = target.name() if isinstance(target, OpOverload) else getattr(target, "_qualified_op_name", "")
    return COMPOSITES.get(target) or grouped_mm.NAMED.get(name)
