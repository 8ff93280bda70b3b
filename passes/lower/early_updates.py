"""Early optimizer updates: each is moved to where its gradient is reduced and the old parameter has been read for the last time.

    g2 = mm(..)  r2 = all_reduce(g2)  g1 = mm(..)  r1 = all_reduce(g1)  g0 = mm(..)  r0 = all_reduce(g0)  adam_many_([w2, w1, w0], ...)
  becomes
    g2 = mm(..)  r2 = all_reduce(g2)  g1 = mm(..)  r1 = all_reduce(g1)  adam_many_([w2], [r2], ...)
    g0 = mm(..)  r0 = all_reduce(g0)  adam_many_([w1], [r1], ...)  adam_many_([w0], [r0], ...)

So not all gradients are in memory at once, but those of two buckets. A reduction's result is read when the next one along its axes starts:
by then it has arrived. Where gradients are clipped, updates stand behind the norm, which reads all of them. Nodes that widen, scale or
slice operands for an update move with it, and so do the squares of its gradient for a norm that is only reported.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.ir import has_record, is_getitem, is_tensor, local_bytes, phase_of, record, runs_on_host, spmd
from meshc.ir.graph import ancestors_of, descendants_of
from meshc.ops import norm as _norm  # noqa: F401 - registers meshc::square_sum
from meshc.ops.optim import MANY, WRITTEN
from meshc.passes.lower.low_precision_state import WIDENS
from meshc.passes.lower.prefetch_windows import window_limit
from meshc.program import in_flight
from meshc.program.packing import is_view, may_view, readers_of_memory

REDUCTIONS: Final = (spmd.all_reduce, spmd.reduce_scatter)

FUSED: Final = frozenset(MANY.values())

PARTS: Final = 2
"""Groups of updates to a window, at most about: a bucket may be a little smaller than an eighth of all gradients."""


def move_updates_early(graph: Graph) -> None:
    """Moves each update of a graph, before fusion, to its earliest place. In place."""
    places = UpdatePlaces(graph)
    for part in places.parts([node for node in places.nodes if node.target in MANY]):
        places.bring(part)


def updates_amid_backward(graph: Graph) -> set[Node]:
    """Fused updates behind which backward goes on, and the last of the reductions that each reads."""
    found, goes_on = set[Node](), False
    for node in reversed(graph.nodes):
        if node.target in FUSED and goes_on and not runs_on_host(node):
            gradients = ancestors_of(node.all_input_nodes, through=lambda operand: is_view(operand) or _moves(operand))
            found |= {node, max((gradient for gradient in gradients if gradient.target in REDUCTIONS), default=node)}
        goes_on |= phase_of(node) == "backward" and not is_view(node) and not spmd.is_collective(node.target)
    return found


class Positions:
    """`index`: the position of each of a graph's nodes; `first`: that of the last placeholder."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = list(nodes)
        self.index = {node: index for index, node in enumerate(self.nodes)}
        self.first = max((index for node, index in self.index.items() if node.op == "placeholder"), default=0)
        self._reductions = [index for node, index in self.index.items() if node.target in REDUCTIONS]

    def arrival(self, reduction: Node, alike: bool) -> int:
        """The position of the next reduction, of those along the same axes if `alike`: by then a reduction has arrived."""
        later = self._reductions[bisect(self._reductions, self.index[reduction]) :]
        return next((at for at in later if not alike or self.nodes[at].args[1] == reduction.args[1]), len(self.nodes) - 1)


class UpdatePlaces(Positions):
    """Earliest places of the updates of a stage in which they are not fused yet."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(node for node in graph.nodes if node.op != "output")
        self.until = in_flight.waits(graph.nodes)
        self.behind = list(self.nodes)
        """By position of each node, the last node that was moved right behind it, or the node itself."""
        self._ready: dict[Node, int] = {}
        self._norms = [node for node in self.nodes if node.target is torch.ops.meshc.square_sum.default]
        self._moves, self._with_operands = cache(_moves), cache(self._follow)

    def parts(self, members: Sequence[Node], limit: int | None = None) -> list[list[Node]]:
        """Groups of members that are updated together, in the graph's order. `limit`: bytes of gradients from which a group is full;
        members with the same earliest place are in one group."""
        at = {member: self.position_of(member) for member in members}
        sizes = {member: local_bytes(record(_gradient(member))) for member in members}
        enough = window_limit(sum(sizes.values()), PARTS) if limit is None else limit
        parts: list[list[Node]] = []
        for member in sorted(members, key=at.__getitem__):
            if not parts or (at[member] > at[parts[-1][-1]] and sum(sizes[one] for one in parts[-1]) >= enough):
                parts.append([])
            parts[-1].append(member)
        return [sorted(part, key=self.index.__getitem__) for part in parts]

    def position_of(self, member: Node) -> int:
        """The position behind which a member may be placed."""
        own = self._own(member) | descendants_of([member])
        readers = (user for root in _written_memory(member) for user in readers_of_memory(root, _shares) if user not in own)
        return max([self._ready_position(member), *map(self._read_position, readers)])

    def bring(self, members: Sequence[Node]) -> None:
        """Moves members, with the nodes computed for them, behind the latest of their places."""
        at = max(map(self.position_of, members))
        own = {node for member in members for node in self._own(member)}
        operands = {operand for node in own for operand in node.all_input_nodes}
        norms = {norm for norm in self._norms if norm.args[0] in operands and self._ready_position(norm) <= at}
        moving = sorted(own | norms, key=self.index.__getitem__)
        for node in moving:
            if self.index[node] > at:
                self.behind[at].append(node)
                self.behind[at] = node
                self.index[node] = at  # readers of it find it there

    def replace_member(self, member: Node, by: Node) -> None:
        """Nodes that are moved behind `member` from now on are moved behind `by`, its replacement."""
        self.behind = [by if node is member else node for node in self.behind]
        self.index[by] = self.index[member]

    def _own(self, node: Node) -> set[Node]:
        """A node with the operands that move with it: with clipping all terms of the norm, a chain as long as there are parameters, which
        is followed once for all that read it."""

        def alone(one: Node) -> bool:
            return one is node or (self._moves(one) and len(one.users) == 1)

        near = [one for one in ancestors_of([node], through=alone) if one is node or self._moves(one)]
        return set(near).union(*(self._with_operands(one) for one in near if not alone(one)))

    def _follow(self, node: Node) -> list[Node]:
        return list(filter(self._moves, ancestors_of([node], through=self._moves)))

    def _ready_position(self, node: Node) -> int:
        """The position at which a value is ready if all before it run as early as they can. Without recursion: the terms of a norm are a
        chain as long as there are parameters."""
        work = [node]
        while node not in self._ready:
            one = work[-1]
            behind = one.all_input_nodes if one.target not in REDUCTIONS and (self._moves(one) or is_view(one)) else []
            if unknown := [operand for operand in behind if operand not in self._ready]:
                work += unknown
            else:
                self._ready[work.pop()] = max([self._own_position(one), *map(self._ready.__getitem__, behind)])
        return self._ready[node]

    def _own_position(self, node: Node) -> int:
        """The position at which a node runs at the earliest; of a reduction, at which it has arrived."""
        if node.target in REDUCTIONS:
            return self.arrival(node, alike=True)
        return self.first if node.op == "placeholder" or self._moves(node) else self.index[node]

    def _read_position(self, reader: Node) -> int:
        """The position at which a reader is done: a collective or a copy, once it has been waited for."""
        if not (spmd.is_collective(reader.target) or spmd.is_host_copy(reader.target)):
            return self.index[reader]
        last = len(self.nodes) - 1
        return self.index.get(self.until[reader], last) if reader in self.until else last


def _gradient(member: Node) -> Node:
    gradient = member.args[1]
    assert isinstance(gradient, Node)
    return gradient


def _moves(node: Node) -> bool:
    """Whether a node belongs to the update phase and may move with its reader; also copies of inputs from the host."""
    if node.op != "call_function" or not has_record(node) or spmd.is_collective(node.target):
        return False
    if spmd.is_host_copy(node.target) and not (node.target is spmd.from_host and node.all_input_nodes[0].op == "placeholder"):
        return False
    return not runs_on_host(node) and (is_getitem(node) or phase_of(node) in ("update", ""))


def _written_memory(member: Node) -> list[Node]:
    """The values that own the memory which a member writes, or which stores its results."""

    def has_others_memory(node: Node) -> bool:
        return is_view(node) or node.target in WIDENS or spmd.is_collective(node.target)

    operands = [member.args[place] for place in WRITTEN[member.target]]  # type: ignore[index]
    found = ancestors_of((one for one in operands if isinstance(one, Node)), through=has_others_memory)
    return [root for root in found if is_tensor(root) and not has_others_memory(root)]


def _shares(user: Node) -> bool:
    """Whether a reader's result may share its operand's memory: a collective over one rank returns its operand."""
    return may_view(user) or spmd.is_collective(user.target)
