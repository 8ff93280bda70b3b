"""Raise sinks: attention with sinks that a model writes out, as gpt-oss does, as one call.

    scores = matmul(q, transpose(k, 2, 3)) * scale + mask                     out = sink_attention(q, k, v, mask, sinks, scale)
    combined = cat([scores, sinks], -1)
    weights = softmax(combined - combined.max(-1, True)[0], -1)[..., :-1]
    out = matmul(weights, v)

Part of `raise_ops`. Nothing else may read the values between: a model that also returns its attention weights is unchanged, and so is one
with dropout.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from meshc.ops.attention_sinks import sink_attention
from meshc.passes.trace.chains import (
    ADDS,
    IDLE,
    MATMULS,
    MULTIPLIES,
    SOFTMAXES,
    SUBTRACTS,
    TRANSPOSES,
    PatternMismatch,
    argument,
    drops_nothing,
    forget,
    need,
    node_of,
    only,
    reader,
)
from meshc.passes.trace.own_results import own_result
from meshc.passes.trace.stand_ins import StandIns

functional = torch.nn.functional


def raise_sinks(module: GraphModule, stand_ins: StandIns) -> None:
    """Replaces the calls in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node.target not in SOFTMAXES or node in stand_ins.transformed_nodes:
            continue
        try:
            out, operands = _match_attention(node)
        except PatternMismatch:
            continue
        with graph.inserting_before(out):
            made = graph.call_function(sink_attention, operands)
        made.meta.update(out.meta)
        stand_ins.compare(made)
        out.replace_all_uses_with(made)
        forget(out)
        own_result(made)


def _match_attention(softmax: Node) -> tuple[Node, tuple[Any, ...]]:
    """(the last product, operands of `sink_attention`) around a softmax."""
    need(argument(softmax, 1, "dim") in (-1, 3))
    combined = _without_shift(node_of(softmax.args[0]))
    need(combined.op == "call_function" and combined.target is torch.cat and argument(combined, 1, "dim") in (-1, 3))
    parts = combined.args[0]
    need(isinstance(parts, list | tuple) and len(parts) == 2)
    scores, sinks = (node_of(part) for part in parts)  # type: ignore[union-attr]
    out, values = _match_values(softmax)
    q, k, scale, bias = _match_scores(scores)
    return out, (q, k, values, bias, sinks, scale)


def _without_shift(x: Node) -> Node:
    """The operand of a softmax, without the subtraction of its maximum, which changes nothing."""
    if x.target not in SUBTRACTS or len(x.args) != 2:
        return x
    combined, greatest = (node_of(one) for one in x.args)
    if greatest.target is operator.getitem:
        need(greatest.args[1] == 0)
        greatest = only(node_of(greatest.args[0]))
    need(greatest.target in ("max", "amax", torch.max, torch.amax) and greatest.args[0] is combined)
    need(argument(greatest, 1, "dim") in (-1, 3) and argument(greatest, 2, "keepdim") is True)
    need(set(combined.users) == {x, greatest} and len(greatest.users) == 1 and len(x.users) == 1)
    return combined


def _match_values(softmax: Node) -> tuple[Node, Node]:
    """(product of the weights and the values, values), where the weights are all columns but the last, unchanged in between."""
    weights = reader(softmax)
    need(weights.target is operator.getitem and weights.args[1] == (Ellipsis, slice(None, -1, None)))
    following = reader(weights)
    while following.target not in MATMULS:
        idle = following.target in IDLE or drops_nothing(following)
        need(idle and following.args[0] is weights)
        weights, following = following, reader(following)
    need(following.args[0] is weights and len(following.args) == 2)
    return following, node_of(following.args[1])


def _match_scores(scores: Node) -> tuple[Node, Node, float, Node | None]:
    """(q, k, scale, bias) of scores, read from the last call to the first."""
    bias: Node | None = None
    scale: object = 1.0
    x = only(scores)
    if x.target in ADDS and not x.kwargs:
        x, bias = only(node_of(x.args[0])), node_of(x.args[1])
    if x.target in MULTIPLIES:
        x, scale = only(node_of(x.args[0])), x.args[1]
    need(x.target in MATMULS and len(x.args) == 2 and isinstance(scale, int | float))
    q, turned = (node_of(one) for one in x.args)
    need(turned.target in TRANSPOSES and set(turned.args[1:3]) in ({2, 3}, {-1, -2}))
    assert isinstance(scale, int | float)
    return q, node_of(turned.args[0]), float(scale), bias
