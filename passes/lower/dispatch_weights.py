"""Routing weights in the messages of dispatch and combine: one message for a token's row and its weights, or their gradients.

    x = gather_rows(tokens, ["ep"], choice, ..)      w = all_gather(weights, ["ep"], 0)      weights_of_groups(w, own, slot)
  becomes
    both = gather_rows(cat([tokens, weights], 1), ["ep"], choice, ..)      x = both[.., :h]      w = both[.., h:]

    dx = scatter_rows(y, ["ep"], choice, ..)         dw = reduce_scatter(weights_to_tokens(..), ["ep"], 0, "sum")
  becomes
    both = scatter_rows(cat([y, weights_to_tokens(..)], 2), ["ep"], choice, ..)      dx = both[:, :h]      dw = both[:, h:]

A rank reads the weights of tokens that chose one of its experts; its part of the gradient is zero for others, as for rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from meshc.ir import is_getitem, record, records, spmd
from meshc.ir.graph import ancestors_of, call, descendants_of
from meshc.ir.nodes import Record

aten, meshc = torch.ops.aten, torch.ops.meshc


@dataclass(frozen=True)
class RoutingWeights:
    """Routing weights, or their gradient, that can travel with rows. `local`: a rank's own, [t, k] or [n * t, k]; `whole`: the collective
    that becomes unnecessary."""

    local: Node
    whole: Node

    @property
    def width(self) -> int:
        return record(self.local).shape[-1]


def weights_for_dispatch(said: Node, gather: Node, before: Node) -> RoutingWeights | None:
    """The routing weights of the choices `said` that can travel with the rows of `gather`; None if there are none. Moves the nodes that
    compute them before `before`, and their readers behind it."""
    found = [node for node in _readers_of_choices(said, meshc.weights_of_groups.default) if record(node).phase == record(before).phase]
    whole = found[0].args[0] if found else None
    if not isinstance(whole, Node) or whole.target is not spmd.all_gather or whole.args[1:] != gather.args[1:]:
        return None
    if not set(whole.users) <= set(found):
        return None
    return _matching_weights(RoutingWeights(_operand(whole), whole), gather, before)


def weights_for_combine(said: Node, scatter: Node) -> RoutingWeights | None:
    """The gradient of the routing weights that can travel with the rows of `scatter`; None if there is none. Moves it before `scatter`."""
    found = [node for node in _readers_of_choices(said, meshc.weights_to_tokens.default) if record(node).phase == record(scatter).phase]
    whole = next(iter(found[0].users)) if len(found) == 1 and len(found[0].users) == 1 else None
    if whole is None or whole.target is not spmd.reduce_scatter or whole.args[1:] != scatter.args[1:]:
        return None
    return _matching_weights(RoutingWeights(found[0], whole), scatter, scatter)


def concatenate_weights(graph: Graph, rows: Node, weights: RoutingWeights) -> Node:
    """Rows [.., t, h] and weights, concatenated: [.., t, h + k]."""
    *before, width = record(rows).shape
    like = replace(record(rows), sharding=None)
    local = weights.local
    if record(local).shape[:-1] != tuple(before):
        local = call(graph, replace(like, shape=(*before, weights.width)), aten.reshape.default, local, [*before, weights.width])
    return call(graph, replace(like, shape=(*before, width + weights.width)), aten.cat.default, [rows, local], len(before))


def split_weights(graph: Graph, both: Node, made: Record, weights: RoutingWeights) -> Node:
    """The rows, with record `made`, of a received concatenation. Readers of the weights read their slice of it."""
    dim, width = len(made.shape) - 1, made.shape[-1]
    rows = call(graph, made, aten.slice.Tensor, both, dim, 0, width)
    like = record(weights.whole)
    behind = replace(like, shape=(*made.shape[:-1], weights.width), sharding=None)
    cut = call(graph, behind, aten.slice.Tensor, both, dim, width, width + weights.width)
    weights.whole.replace_all_uses_with(call(graph, like, aten.reshape.default, cut, list(like.shape)))
    return rows


def _readers_of_choices(said: Node, kind: object) -> list[Node]:
    """The calls of a kind that take the same choices."""
    choices = said.args[0]
    assert isinstance(choices, Node)
    named = [each for each in choices.users if is_getitem(each) and each.args[1] == 0]
    return [node for each in named for node in each.users if node.target is kind]


def _operand(node: Node) -> Node:
    (operand, *_) = node.all_input_nodes
    return operand


def _matching_weights(weights: RoutingWeights, beside: Node, point: Node) -> RoutingWeights | None:
    """`weights` if they have the rows' dtype, phase and partial axes, and the order around `point` allows it; else None."""
    local, rows = record(weights.local), record(_operand(beside))
    if local.dtype != rows.dtype or record(weights.local).phase != record(beside).phase:
        return None
    if (local.sharding is None) != (rows.sharding is None):
        return None
    if local.sharding is not None and rows.sharding is not None and local.sharding.partial != rows.sharding.partial:
        return None
    return weights if _make_order(weights, point) else None


def _make_order(weights: RoutingWeights, point: Node) -> bool:
    """Moves the nodes that compute `weights` before `point`, and their readers behind it. False, with nothing moved, if that is
    impossible."""
    order = {node: number for number, node in enumerate(point.graph.nodes)}
    at = order[point]
    late = [node for node in ancestors_of([weights.local], lambda node: order[node] > at) if order[node] >= at]
    early = [
        node for node in descendants_of([weights.whole], lambda node: order[node] < at) if order[node] < at and node is not weights.whole
    ]
    first = min((order[node] for node in early), default=at)
    read = ancestors_of([point], lambda node: order[node] > first)
    if point in late or not _are_movable(late, point) or not _are_movable(early, point) or not read.keys().isdisjoint(early):
        return False
    for node in sorted(late, key=order.__getitem__):
        point.prepend(node)
    behind = point
    for node in sorted(early, key=order.__getitem__):
        behind.append(node)
        behind = node
    return True


def _are_movable(nodes: Sequence[Node], point: Node) -> bool:
    """Whether all nodes are calls of the phase of `point`."""
    there = {record(point).phase}
    return all(node.op == "call_function" and {one.phase for one in records(node)} == there for node in nodes)
