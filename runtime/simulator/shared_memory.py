"""Shared memory of values (`meshc/ir/sharing.py`), played on one simulated rank.

    flat: "f32[68]; its parts inside, kept" = aten.cat([a, b])              a and b are put into the memory of flat when they are made
    r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")        flat is r from here on

What a stage keeps belongs to what lies there next (`meshc/program/kept.py`), and to its next call: nothing is left there by then. So a
program that reads what another line has written over, or whose result lies in what is kept, gives other numbers here as it would on ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from meshc.ir import record
from meshc.ir.sharing import KEPT, OVER_OPERAND, sharing_of
from meshc.program.kept import places
from meshc.program.packing import pieces


class SharedMemory:
    """Of one run of a stage on one rank."""

    def __init__(self, graph: Graph) -> None:
        self.pieces = pieces(graph)
        self.wholes: dict[Node, torch.Tensor] = {}
        """Memory that parts are made in, by the `cat` that has it."""
        self.before = {node: earlier for values in places(graph) for earlier, node in pairwise(values)}
        """By what lies in kept memory, what lay there before it."""
        self.kept: dict[Node, torch.Tensor] = {}

    def place(self, node: Node, made: object, env: Mapping[Node, object]) -> object:
        """A value that has just been made, in the memory that is said to have it. `env`: the values of its operands."""
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
        """What a value is about to be made in no longer has what it had."""
        if node in self.before:
            _forget(self.kept.pop(self.before[node], None))

    def _inside(self, node: Node, made: torch.Tensor) -> torch.Tensor:
        piece = self.pieces[node]
        if piece.whole not in self.wholes:
            self.wholes[piece.whole] = made.new_empty(record(piece.whole).shape)
        there = self.wholes[piece.whole][piece.start : piece.start + piece.size].view(made.shape)
        return there.copy_(made)

    def leave(self) -> None:
        """The stage is over: its next call has what is kept."""
        for memory in self.kept.values():
            _forget(memory)


def _forget(memory: torch.Tensor | None) -> None:
    if memory is not None:
        memory.fill_(float("nan") if memory.is_floating_point() else 0)
