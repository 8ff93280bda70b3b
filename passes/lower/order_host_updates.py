"""Order of updates on the host: gradients are copied out as they are computed, each update runs once its operands have arrived.

    g2 = mm(..)  g1 = mm(..)  h2 = to_host(g2)  h1 = to_host(g1)  sgd_(w2, h2)  sgd_(w1, h1)
  becomes
    g2 = mm(..)  h2 = to_host(g2)  sgd_(w2, h2)  g1 = mm(..)  h1 = to_host(g1)  sgd_(w1, h1)

So backward runs beside the updates. The result of a reduction is copied when the next reduction starts: by then it has arrived. The
parameter is copied out beside its gradient, and back behind the last reader of its old value. Where gradients are clipped, updates stand
behind the norm, and gradients wait on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, Node

from meshc.check.overwrites import writes
from meshc.ir import phase_of, runs_on_host, spmd
from meshc.ir.graph import put_in_order
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::square_sum
from meshc.ops.in_place import WRITERS
from meshc.passes.lower.early_updates import REDUCTIONS, Positions
from meshc.program.packing import below_views, is_view, readers_of_memory


def order_host_updates(graph: Graph) -> None:
    """Reorders a graph in place; values do not change."""
    if any(map(runs_on_host, graph.nodes)):
        order = _Order(graph.nodes)
        put_in_order(sorted(order.nodes, key=order.at.__getitem__))
        graph.lint()


class _Order(Positions):
    """`at`: the position behind which a node is placed, its own if it does not move."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__(nodes)
        nodes = self.nodes
        gone = [node for node in nodes if node.target is spmd.to_host and len(node.args) == 1 and phase_of(node) == "update"]
        self.sent = {node for node in gone if node.all_input_nodes[0].op == "placeholder"}
        moved = {*gone, *(node for node in nodes if runs_on_host(node) or _replaces(node))} - self.sent
        read = {operand for node in gone for operand in node.all_input_nodes}
        for node in reversed(nodes):
            looks = is_view(node) and node.users and moved.issuperset(node.users)
            if looks or (node.target is torch.ops.meshc.square_sum.default and not read.isdisjoint(node.all_input_nodes)):
                moved.add(node)
        self.writers = writers(nodes)
        self.at: dict[Node, int] = {}
        for node in nodes:
            self.at[node] = min(self.index[node], self._behind(node)) if node in moved else self.index[node]
        for node in self.sent:
            self.at[node] = min([self.index[node], *(self.at[user] for user in node.users)])

    def _behind(self, node: Node) -> int:
        found = [self.first, *(self._ready(operand) for operand in node.all_input_nodes if operand not in self.sent)]
        for operand in node.all_input_nodes:
            found += [self.at[one] for one in self.writers.get(below_views(operand), ()) if self.index[one] < self.index[node]]
        for operand in map(below_views, _written_values(node)):
            readers = readers_of_memory(operand, lambda user: is_view(user) or spmd.is_host_copy(user.target))
            found += [self.at[reader] for reader in readers if reader not in self.sent and self.index[reader] < self.index[node]]
        return max(found)

    def _ready(self, node: Node) -> int:
        """Position at which an operand has been computed; for a reduction, that of the next reduction."""
        if node.target in REDUCTIONS:
            return self.arrival(node, alike=False)
        if node.op == "placeholder":
            return self.first
        return max(self.at[node], self._ready(node.all_input_nodes[0])) if is_view(node) else self.at[node]


def _replaces(node: Node) -> bool:
    """Whether a node copies from the host over a given value on the device."""
    return node.target is spmd.from_host and len(node.args) == 2


def writers(nodes: Iterable[Node]) -> Mapping[Node, list[Node]]:
    """Nodes on the host that write a value's memory, by the value that owns the memory."""
    found: dict[Node, list[Node]] = defaultdict(list)
    for node in nodes:
        for operand in _written_values(node) if runs_on_host(node) else ():
            found[below_views(operand)].append(node)
    return found


def _written_values(node: Node) -> list[Node]:
    if _replaces(node):
        return [node.args[1]]  # type: ignore[list-item]
    return writes(node) if node.target in WRITERS else []
