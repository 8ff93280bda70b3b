"""Raise sinks: attention with sinks that a model writes out, as gpt-oss does, becomes one call.

    scores = matmul(q, transpose(k, 2, 3)) * scale + mask                     out = sink_attention(q, k, v, mask, sinks, scale)
    combined = cat([scores, sinks], -1)
    weights = softmax(combined - combined.max(-1, True)[0], -1)[..., :-1]
    out = matmul(weights, v)

Part of `raise_ops`. Nothing else may read what lies between: a model that also returns its weights is left as it is, and so is one with
dropout.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from meshc.ops.attention_sinks import sink_attention

functional = torch.nn.functional

MATMULS: tuple[object, ...] = (torch.matmul, operator.matmul, "matmul")
SOFTMAXES: tuple[object, ...] = (functional.softmax, torch.softmax, "softmax")
TRANSPOSES: tuple[object, ...] = (torch.transpose, "transpose")
MULTIPLIES: tuple[object, ...] = (operator.mul, torch.mul, "mul")
ADDS: tuple[object, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
SUBTRACTS: tuple[object, ...] = (operator.sub, torch.sub, "sub")
IDLE: tuple[object, ...] = ("to", "type_as", "float", "contiguous")


class _Otherwise(Exception):
    """It is something else."""


def raise_sinks(module: GraphModule) -> None:
    """Replace the calls in place."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node.target not in SOFTMAXES:
            continue
        try:
            out, operands = _matched(node)
        except _Otherwise:
            continue
        with graph.inserting_before(out):
            made = graph.call_function(sink_attention, operands)
        made.meta.update(out.meta)
        out.replace_all_uses_with(made)
        _forget(out)


def _matched(softmax: Node) -> tuple[Node, tuple[Any, ...]]:
    """(the last product, operands of `sink_attention`) around a softmax."""
    _need(_argument(softmax, 1, "dim") in (-1, 3))
    combined = _shifted(_node(softmax.args[0]))
    _need(combined.op == "call_function" and combined.target is torch.cat and _argument(combined, 1, "dim") in (-1, 3))
    parts = combined.args[0]
    _need(isinstance(parts, list | tuple) and len(parts) == 2)
    scores, sinks = (_node(part) for part in parts)  # type: ignore[union-attr]
    out, values = _mixed(softmax)
    q, k, scale, bias = _scored(scores)
    return out, (q, k, values, bias, sinks, scale)


def _shifted(x: Node) -> Node:
    """What a softmax is of, without the subtraction of its greatest, which changes nothing."""
    if x.target not in SUBTRACTS or len(x.args) != 2:
        return x
    combined, greatest = (_node(one) for one in x.args)
    if greatest.target is operator.getitem:
        _need(greatest.args[1] == 0)
        greatest = _only(_node(greatest.args[0]))
    _need(greatest.target in ("max", "amax", torch.max, torch.amax) and greatest.args[0] is combined)
    _need(_argument(greatest, 1, "dim") in (-1, 3) and _argument(greatest, 2, "keepdim") is True)
    _need(set(combined.users) == {x, greatest} and len(greatest.users) == 1 and len(x.users) == 1)
    return combined


def _mixed(softmax: Node) -> tuple[Node, Node]:
    """(the product with the values, the values): of the weights, all but the last column, with nothing done to them."""
    weights = _reader(softmax)
    _need(weights.target is operator.getitem and weights.args[1] == (Ellipsis, slice(None, -1, None)))
    reader = _reader(weights)
    while reader.target not in MATMULS:
        idle = reader.target in IDLE or reader.target is functional.dropout and _drops_nothing(reader)
        _need(idle and reader.args[0] is weights)
        weights, reader = reader, _reader(reader)
    _need(reader.args[0] is weights and len(reader.args) == 2)
    return reader, _node(reader.args[1])


def _drops_nothing(node: Node) -> bool:
    return _argument(node, 1, "p", 0.5) == 0.0 or _argument(node, 2, "training", True) is False


def _scored(scores: Node) -> tuple[Node, Node, float, Node | None]:
    """(q, k, scale, bias) of scores, read from the last call to the first."""
    bias: Node | None = None
    scale: object = 1.0
    x = _only(scores)
    if x.target in ADDS and not x.kwargs:
        x, bias = _only(_node(x.args[0])), _node(x.args[1])
    if x.target in MULTIPLIES:
        x, scale = _only(_node(x.args[0])), x.args[1]
    _need(x.target in MATMULS and len(x.args) == 2 and isinstance(scale, int | float))
    q, turned = (_node(one) for one in x.args)
    _need(turned.target in TRANSPOSES and set(turned.args[1:3]) in ({2, 3}, {-1, -2}))
    assert isinstance(scale, int | float)
    return q, _node(turned.args[0]), float(scale), bias


def _argument(node: Node, place: int, name: str, default: object = None) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _need(holds: object) -> None:
    if not holds:
        raise _Otherwise


def _node(x: object) -> Node:
    _need(isinstance(x, Node))
    assert isinstance(x, Node)
    return x


def _only(x: Node) -> Node:
    """A value that one call reads."""
    _need(len(x.users) == 1)
    return x


def _reader(x: Node) -> Node:
    return next(iter(_only(x).users))


def _forget(node: Node) -> None:
    """Erases a call that nobody reads, and of what it read that which is read no more."""
    if node.op in ("call_function", "call_method") and not node.users:
        before = dict.fromkeys(node.all_input_nodes)
        node.graph.erase_node(node)
        for one in before:
            _forget(one)
