"""Builder of the per-rank graph: emits nodes with local shape and dtype, and the integers for a rank's place."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.ir import Record, Source, is_getitem, operands, record, set_record, spmd
from meshc.ir.functions import Function, Target
from meshc.ir.graph import create_call
from meshc.ir.likeness import like
from meshc.ir.open_shapes import OpenShapes
from meshc.ir.sharding import Part, Sharding
from meshc.ir.sizes import Dynamic
from meshc.passes.phases.zigzag_axes import typed_sharding

aten = torch.ops.aten


class Builder:
    """Emits nodes into `graph`. `shape(node)` and `dtype(node)` are local, computed by running the operator on meta tensors.

    `entries` are the plan's lines by axis, for reasons. `open_sizes` are the dynamic sizes of the program.
    """

    def __init__(self, sizes: Mapping[str, int], open_sizes: Sequence[Dynamic] = ()) -> None:
        self.graph = Graph()
        self.sizes = sizes
        self.open = OpenShapes(open_sizes)
        self.shapes: dict[Node, tuple[int, ...]] = {}
        self.items: dict[Node, list[tuple[int, ...]]] = {}
        self.meta: dict[Node, tuple[Any, ...]] = {}
        self.context = Record()
        self.entries: Mapping[str, str] = {}
        self.arranged: dict[tuple[Node, object], Node] = {}
        """Reordered values, memoised by the value and its order."""
        self._integers: dict[object, Node] = {}

    def placeholder(self, name: str, record: Record) -> Node:
        node = self.graph.placeholder(name)
        set_record(node, record)
        empty = partial(torch.empty, dtype=record.dtype, device="meta")
        self.meta[node] = tuple(empty(at(record.shape)) if record.dtype else 0 for at in self.open.worlds)
        self.shapes[node] = record.shape
        return node

    def shape(self, node: Node) -> tuple[int, ...]:
        return self.shapes[node]

    def dtype(self, node: Node) -> torch.dtype:
        found: torch.dtype = self.meta[node][0].dtype
        return found

    def emit(self, target: Target, *args: Any, sharding: Sharding | None = None, reason: str | None = None, **kwargs: Any) -> Node:
        """A call; its record has the shape and dtype that the call returns on meta tensors."""
        assert callable(target), target
        node = create_call(self.graph, target, args, kwargs)
        results = self.open.results(target, args, kwargs, self.meta, self.sizes)
        self.meta[node] = results
        near = [self.shapes[argument] for argument in operands(node) if argument in self.shapes]
        if isinstance(results[0], list | tuple):
            self.items[node] = [self.open.shape(row, near, (args, kwargs), node) for row in zip(*results, strict=True)]
            set_record(node, tuple(map(self._record, results[0], self.items[node])))
            return node
        if is_getitem(node):
            self.shapes[node] = self.items[args[0]][args[1]]
        elif spmd.is_collective(target) or target is spmd.shard:
            self.shapes[node] = tuple(spmd.collective_shape(target, self.shapes[args[0]], args[1:], self.sizes))
        else:
            self.shapes[node] = self.open.shape(results, near, (args, kwargs), node)
        made = self._record(results[0], self.shapes[node], None if sharding is None else typed_sharding(sharding))
        set_record(node, made if reason is None else like(made, reason=reason))
        return node

    def _record(self, result: object, shape: tuple[int, ...], sharding: Sharding | None = None) -> Record:
        shape, dtype = (shape, result.dtype) if isinstance(result, torch.Tensor) else ((), None)
        return like(self.context, sharding=sharding, shape=shape, dtype=dtype)

    def item(self, node: Node, index: int) -> Node:
        """One result of a node with several."""
        return self.emit(operator.getitem, node, index)

    def emit_zigzag(self, x: Node, dim: int, axes: Sequence[str], home: bool, reason: str) -> Node:
        """A tile exchanged for the rank's part in zigzag order along a dim; with `home`, the other way round."""
        return self.emit(spmd.from_zigzag if home else spmd.to_zigzag, x, list(axes), dim, reason=reason)

    def with_sharding(self, node: Node, sharding: Sharding) -> Node:
        """`node` for a record with this sharding; a view of it if its own record has other dims split, since a reshape that changes no
        shape on a rank returns its operand, whose record has to stay."""
        own = record(node).sharding if node in self.shapes else None
        if own is None or _splitting_axes(own) == _splitting_axes(typed_sharding(sharding)):
            return node
        return self.emit(aten.reshape.default, node, list(self.shape(node)))

    # ------------------------------------------------------------------------------------------------------------------ integers

    def coordinate(self, axis: str) -> Node:
        return self._integer(("coordinate", axis), spmd.coordinate, axis)

    def index(self, axes: Sequence[str]) -> Node:
        """Row-major index of this rank along `axes`."""
        if len(axes) == 1:
            return self.coordinate(axes[0])
        counts = [self.sizes[axis] for axis in axes]
        return self._integer(("index", tuple(axes)), spmd.tile_start, prod(counts), counts, [self.coordinate(axis) for axis in axes])

    def tile_start(self, part: Part) -> Node | int:
        return self.tile(spmd.tile_start, part) if part.axes else 0

    def tile_count(self, part: Part) -> Node | int:
        return self.tile(spmd.tile_count, part) if part.axes else part.size

    def tile(self, function: Function, part: Part, at: Sequence[Node] | None = None) -> Node:
        """`function` (tile_start or tile_count) of this rank's tile, or of that of the rank at coordinates `at`."""
        counts = [self.sizes[axis] for axis in part.axes]
        at = [self.coordinate(axis) for axis in part.axes] if at is None else list(at)
        return self._integer((function.__name__, part.size, part.axes, *at), function, part.size, counts, at)

    def place(self, axis: str, back: int) -> Node:
        """The coordinate on an axis `back` places before this rank's, round the ring."""
        if not back:
            return self.coordinate(axis)
        return self._integer(("place", axis, back), spmd.ring_place, self.coordinate(axis), back, self.sizes[axis])

    def _integer(self, key: object, function: Function, *args: object) -> Node:
        if key not in self._integers:
            context, self.context = self.context, Record(source=Source())
            self._integers[key] = self.emit(function, *args)
            self.context = context
        return self._integers[key]


def _splitting_axes(sharding: Sharding) -> list[list[tuple[str, ...]]]:
    """The cuts of the split parts of each dim."""
    return [[part.cuts for part in dim if part.axes] for dim in sharding.dims]
