"""Exchanges of dispatch and combine: all ranks at once, or hierarchical in two hops, between nodes and inside them.

    x = gather_rows(tokens, ["ep_across", "ep_inside"], choice, 2, 0.79)                every rank to every other

    there = gather_rows(tokens, ["ep_across"], choices of my place's tokens, 4, 1.0)    [1, nodes * t, h]: to my place in each node
    x = gather_rows(there as [nodes, t, h], ["ep_inside"], choice - 4 * node, 2, 0.79)  [1, nodes, ranks * t, h]: on inside my node

A row with experts on several ranks of another node crosses once, and is distributed inside; their results are added up inside, and the sum
crosses once. The receivers in both hops follow from the same choices: a hop is a gather_rows of its own, with the choices that concern it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, prod
from typing import Final, TypeAlias

import torch
from torch.fx import Graph, Node

from meshc.ir import record, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ir.nodes import Record
from meshc.ir.sharding import Part, Sharding

aten = torch.ops.aten

Parts: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes that lead from node to node, and axes inside a node."""
NUMBER: Final = Record(shape=(), dtype=None)


@dataclass(frozen=True)
class Choices:
    """Expert choices of all tokens: `choice` [.., tokens, k]. Of `experts` in all, rank r along `axes` has the `each` experts from
    r * `each` on."""

    choice: Node
    axes: tuple[str, ...]
    each: int
    experts: int

    @property
    def share(self) -> float:
        """The expected share of tokens with a choice at a rank, if all experts are equally likely."""
        chosen = record(self.choice).shape[-1]
        return round(1 - comb(self.experts - self.each, chosen) / comb(self.experts, chosen), 4)


def leading_parts(sharding: Sharding) -> tuple[Part, ...]:
    """The parts of all dims but the last, as one dim."""
    return tuple(part for dim in sharding.dims[:-1] for part in dim)


@dataclass(frozen=True)
class DispatchHops:
    """Emits exchanges of rows, [t, h] on each of the ranks along `found.axes`, into `graph`. `sizes`: of the mesh's axes."""

    graph: Graph
    sizes: Mapping[str, int]
    found: Choices

    def dispatch(self, rows: Node, made: Record) -> list[Node]:
        """Dispatch in one exchange. `made`: record of the result [1, n * t, h]."""
        return [self._call(spmd.gather_rows, made, rows, self._all_choices())]

    def combine(self, rows: Node, made: Record) -> list[Node]:
        """Combine in one exchange. `rows`: [1, n * t, h]; `made`: record of the result [t, h]."""
        return [self._call(spmd.scatter_rows, made, rows, self._all_choices())]

    def dispatch_by_node(self, rows: Node, made: Record, parts: Parts) -> list[Node]:
        """Dispatch in two hops, across nodes and then inside; the nodes emitted, the result last."""
        across, inside, nodes, ranks = *parts, self._count(parts[0]), self._count(parts[1])
        tokens, width = record(rows).shape
        there = replace(made, shape=(1, nodes * tokens, width), sharding=None)
        first = self._call(spmd.gather_rows, there, rows, self._choices_across(across, inside))
        blocks = self._reshape(first, [nodes, tokens, width])
        spread = replace(made, shape=(1, nodes, ranks * tokens, width), sharding=None)
        second = self._call(spmd.gather_rows, spread, blocks, self._choices_inside(across, inside))
        return [first, second, self._reshape(second, made.shape, made)]

    def combine_by_node(self, rows: Node, made: Record, parts: Parts) -> list[Node]:
        """Combine in two hops, inside nodes and then across; the nodes emitted, the result last."""
        across, inside, nodes, ranks = *parts, self._count(parts[0]), self._count(parts[1])
        tokens, width = made.shape
        blocks = self._reshape(rows, [1, nodes, ranks * tokens, width])
        added = replace(made, shape=(nodes, tokens, width), sharding=None)
        first = self._call(spmd.scatter_rows, added, blocks, self._choices_inside(across, inside))
        there = self._reshape(first, [1, nodes * tokens, width])
        second = self._call(spmd.scatter_rows, made, there, self._choices_across(across, inside))
        return [first, second]

    def _call(self, kind: Function, made: Record, rows: Node, found: Choices) -> Node:
        return call(self.graph, made, kind, rows, [*found.axes], found.choice, found.each, found.share)

    def _all_choices(self) -> Choices:
        """The choices of all tokens, as [tokens, k]."""
        like = record(self.found.choice)
        lies = None if like.sharding is None else Sharding((leading_parts(like.sharding), like.sharding.dims[-1]))
        shape = (self._tokens(), like.shape[-1])
        return replace(self.found, choice=self._reshape(self.found.choice, shape, replace(like, shape=shape, sharding=lies)))

    def _choices_across(self, across: tuple[str, ...], inside: tuple[str, ...]) -> Choices:
        """Choices of nodes, for the tokens of ranks with this rank's place inside their nodes."""
        nodes, ranks, chosen = self._count(across), self._count(inside), record(self.found.choice).shape[-1]
        tokens = self._tokens() // (nodes * ranks)
        by_node = self._reshape(self.found.choice, [nodes, ranks * tokens, chosen])
        made = replace(record(by_node), shape=(nodes, tokens, chosen), sharding=None)
        mine = call(self.graph, made, spmd.shard, by_node, 1, ranks, self._place(inside))
        flat = self._reshape(mine, [nodes * tokens, chosen])
        return replace(self.found, choice=flat, axes=across, each=ranks * self.found.each)

    def _choices_inside(self, across: tuple[str, ...], inside: tuple[str, ...]) -> Choices:
        """Choices of ranks inside this node, for all tokens, by the node that the tokens come from."""
        nodes, ranks, chosen = self._count(across), self._count(inside), record(self.found.choice).shape[-1]
        by_node = self._reshape(self.found.choice, [nodes, self._tokens() // nodes, chosen])
        first = self._place(across, nodes * ranks * self.found.each)
        here = call(self.graph, replace(record(by_node), sharding=None), aten.sub.Tensor, by_node, first)
        return replace(self.found, choice=here, axes=inside)

    def _place(self, axes: tuple[str, ...], size: int | None = None) -> Node:
        """This rank's number among those along the axes, or the first position of its tile of a dim of `size`."""
        counts = [self.sizes[axis] for axis in axes]
        at = [call(self.graph, NUMBER, spmd.coordinate, axis) for axis in axes]
        if size is None and len(at) == 1:
            return at[0]
        return call(self.graph, NUMBER, spmd.tile_start, prod(counts) if size is None else size, counts, at)

    def _tokens(self) -> int:
        return prod(record(self.found.choice).shape[:-1])


    def _count(self, axes: Sequence[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def _reshape(self, x: Node, shape: Sequence[int], made: Record | None = None) -> Node:
        if tuple(record(x).shape) == tuple(shape):
            return x
        made = made or replace(record(x), shape=tuple(shape), sharding=None)
        return call(self.graph, made, aten.reshape.default, x, list(shape))
