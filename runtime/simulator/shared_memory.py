"""Shared memory of values (`meshc/ir/sharing.py`), played on one simulated rank.

    flat: "f32[68]; its parts inside, kept" = aten.cat([a, b])              a and b are computed into the memory of flat
    r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")        flat has the values of r from here on

Kept memory is reused by the next value placed there (`meshc/program/static_memory.py`), and by the stage's next call; here it is
overwritten before. So a program that reads overwritten values, or whose result shares kept memory, computes other numbers here, as it
would on ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from meshc.ir import record
from meshc.ir.sharing import KEPT, OVER_OPERAND, sharing_of
from meshc.program.packing import pieces
from meshc.program.static_memory import places


class SharedMemory:
    """Shared memory of one run of a stage on one rank."""

    def __init__(self, graph: Graph) -> None:
        self.pieces = pieces(graph)
        self.wholes: dict[Node, torch.Tensor] = {}
        """Memory in which parts are computed, by its `cat`."""
        self.before = {node: earlier for values in places(graph) for earlier, node in pairwise(values)}
        """Value in kept memory -> the value that had this memory before."""
        self.kept: dict[Node, torch.Tensor] = {}

    def place(self, node: Node, made: object, env: Mapping[Node, object]) -> object:
        """A value that has just been computed, moved into the memory that the program gives it. `env`: the values of its operands."""
        if not isinstance(made, torch.Tensor):
            return made
        if node in self.pieces:
            self._begin(self.pieces[node].whole)
            made = self._inside(node, made)
        elif node in self.wholes:
            made = self.wholes.pop(node).view(made.shape)
        elif OVER_OPERAND in sharing_of(node):
            first = node.all_input_nodes[0]
            operand = env[first] if first.op != "placeholder" else None  # a cache's buffer: the model is run on it too
            if isinstance(operand, torch.Tensor) and operand.is_contiguous():
                made = operand.copy_(made)
        if KEPT in sharing_of(node):
            self._begin(node)
            self.kept[node] = made
        return made

    def _begin(self, node: Node) -> None:
        """Overwrites the previous value of the memory in which `node` is about to be computed."""
        if node in self.before:
            _forget(self.kept.pop(self.before[node], None))

    def _inside(self, node: Node, made: torch.Tensor) -> torch.Tensor:
        piece = self.pieces[node]
        if piece.whole not in self.wholes:
            self.wholes[piece.whole] = made.new_empty(record(piece.whole).shape)
        there = self.wholes[piece.whole][piece.start : piece.start + piece.size].view(made.shape)
        return there.copy_(made)

    def leave(self) -> None:
        """Ends the stage: kept memory is overwritten, as by its next call."""
        for memory in self.kept.values():
            _forget(memory)


def _forget(memory: torch.Tensor | None) -> None:
    if memory is not None:
        memory.fill_(float("nan") if memory.is_floating_point() else 0)
