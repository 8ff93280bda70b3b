"""Backward stage specialised to the outputs that received a gradient.

    g = sqrt_backward(tangent:root, r)                                          from `sum` alone
    h = expand(tangent:sum)                                     becomes         h = expand(tangent:sum)
    d = add(g, h);  s = all_reduce(d)                                           s = all_reduce(h)

A node that depends on absent tangents only is absent too: it is linear in them, and torch would never call it. It is removed, not computed
from zeros, since zero times an infinite derivative is NaN, and since its collectives would cost time. An addition keeps its other operand;
where another operator reads both kinds, the absent one is zeros, as in torch. Gradients of absent tangents only are no outputs any more:
such a parameter has no gradient at all, as in torch, so that weight decay and momentum leave it alone.

Assumes the per-rank graph as `cut` leaves it: the values that a forward call saves are the same for every set of outputs.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.ir import Record, record
from meshc.ir.graph import add_placeholder, call
from meshc.ir.keys import is_a, key_of
from meshc.passes.phases.splitter import split_stage
from meshc.program.program import Stage

aten = torch.ops.aten


def specialise(stage: Stage, received: Collection[str]) -> Stage:
    """The backward stage for gradients of the outputs named in `received`; its outputs are the gradients behind at least one of them."""
    keys = stage.keys()
    pruned = _PrunedGraph({node for node, key in keys.items() if is_a(key, "tangent")}, {key_of("tangent", name) for name in received})
    for node in stage.graph.nodes:
        if node.op == "placeholder":
            pruned.placeholder(node, keys[node])
        elif node.op == "call_function":
            pruned.call(node)
    kept = [(key, node) for key, node in stage.results().items() if node in pruned.behind - pruned.absent]
    entering = {pruned.made[node]: key for node, key in keys.items() if node in pruned.made}
    return split_stage(stage.name, entering, {key: pruned.made[node] for key, node in kept})


class _PrunedGraph:
    """A copy of a graph without absent nodes. `behind`: nodes that depend on a tangent; `absent`: on absent tangents only."""

    def __init__(self, tangents: Collection[Node], received: Collection[str]) -> None:
        self.graph = Graph()
        self.made: dict[Node, Node] = {}
        self.zeros: dict[Node, Node] = {}
        self.behind: set[Node] = set(tangents)
        self.absent: set[Node] = set()
        self.received = received

    def placeholder(self, node: Node, key: str) -> None:
        if node in self.behind and key not in self.received:
            self.absent.add(node)
            return
        self.made[node] = add_placeholder(self.graph, node)

    def call(self, node: Node) -> None:
        linear = [operand for operand in node.all_input_nodes if operand in self.behind]
        if linear:
            self.behind.add(node)
        if linear and all(operand in self.absent for operand in linear):
            self.absent.add(node)
            return
        self.made[node] = self._other_term(node) or self.graph.node_copy(node, self._operand)

    def _other_term(self, node: Node) -> Node | None:
        """The other operand of an addition with an absent one, if it has the sum's shape and dtype; else None."""
        if node.target is not aten.add.Tensor or node.kwargs or not self.absent.intersection(node.all_input_nodes):
            return None
        (other,) = [operand for operand in node.all_input_nodes if operand not in self.absent]
        mine, whole = record(other), record(node)
        return self.made[other] if (mine.shape, mine.dtype) == (whole.shape, whole.dtype) else None

    def _operand(self, node: Node) -> Node:
        if node not in self.absent:
            return self.made[node]
        if node not in self.zeros:
            like = record(node)
            made = Record(like.shape, like.dtype, like.sharding, like.source, "its output received no gradient", like.phase)
            options: dict[str, Argument] = dict(dtype=like.dtype, device=torch.device("cpu"), pin_memory=False)
            self.zeros[node] = call(self.graph, made, aten.full.default, list(like.shape), 0.0, **options)
        return self.zeros[node]
