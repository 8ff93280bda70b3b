"""Emitter of the calls that a rule's lowering makes, in a proof: into a graph that nothing runs, with local shapes and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.ir import KEY, Record, is_getitem, record, records, set_record, spmd
from meshc.ir.functions import Function, Target
from meshc.ir.graph import create_call
from meshc.ir.open_shapes import OpenShapes
from meshc.ir.reductions import as_integer
from meshc.ir.sharding import Part, local_size
from meshc.proof.tiles import Tiles

aten = torch.ops.aten
Parts = tuple[Part, ...]


class Emitter:
    """Emits calls with local shapes and dtypes, found by running operators on tensors without values."""

    def __init__(self, sizes: Mapping[str, int], open_shapes: OpenShapes) -> None:
        self.graph, self.sizes, self._open = Graph(), sizes, open_shapes
        self.tiles: dict[Node, Tiles] = {}
        """What is known of operands."""
        self._meta: dict[Node, tuple[Any, ...]] = {}
        """Value -> what it is at each assignment of the open sizes."""
        self._integers: dict[object, Node] = {}

    def operand(self, name: str, of: Record) -> Node:
        node = self.graph.placeholder(name)
        set_record(node, of)
        self._meta[node] = tuple(torch.empty(at(of.shape), dtype=of.dtype, device="meta") for at in self._open.worlds)
        return node

    def emit(self, target: Target, *args: Any, **kwargs: Any) -> Node:
        assert callable(target)
        node = create_call(self.graph, target, args, kwargs)
        made = self._meta[node] = self._open.results(target, args, kwargs, self._meta, self.sizes)
        if isinstance(made[0], list | tuple):
            set_record(node, tuple(self._record(node, row, args, kwargs) for row in zip(*made, strict=True)))
        elif spmd.is_collective(target) or target is spmd.shard:
            set_record(node, Record(self._collective_shape(target, args), made[0].dtype))
        elif is_getitem(node):
            set_record(node, records(args[0])[args[1]])
        else:
            set_record(node, self._record(node, made, args, kwargs))
        return node

    def _record(self, node: Node, row: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Record:
        if not isinstance(row[0], torch.Tensor):
            return Record()
        near = [record(one).shape for one in node.all_input_nodes if isinstance(one.meta[KEY], Record)]
        return Record(self._open.shape(row, near, (args, kwargs), node), row[0].dtype)

    def _collective_shape(self, target: Function, args: Sequence[Any]) -> tuple[int, ...]:
        return tuple(spmd.collective_shape(target, record(args[0]).shape, args[1:], self.sizes))

    def coordinate(self, axis: str) -> Node:
        return self._integer(("coordinate", axis), spmd.coordinate, axis)

    def place(self, axis: str, back: int) -> Node:
        if not back:
            return self.coordinate(axis)
        return self._integer(("ring_place", axis, back), spmd.ring_place, self.coordinate(axis), back, self.sizes[axis])

    def index(self, axes: Sequence[str]) -> Node:
        """This rank's number along axes, row-major."""
        if len(axes) == 1:
            return self.coordinate(axes[0])
        counts = [self.sizes[axis] for axis in axes]
        return self._integer(("index", *axes), spmd.tile_start, prod(counts), counts, [self.coordinate(axis) for axis in axes])

    def tile(self, function: Function, part: Part, back: int = 0) -> Node:
        """The start or the count of a part's tile: this rank's, or that of the rank so many places before it."""
        counts = [self.sizes[axis] for axis in part.axes]
        at = [self.place(axis, back) for axis in part.axes]
        return self._integer((function, part.size, part.axes, back), function, part.size, counts, at)

    def _integer(self, key: object, function: Function, *args: Any) -> Node:
        if key not in self._integers:
            self._integers[key] = self.emit(function, *args)
        return self._integers[key]


def mask_padding(emitter: Emitter, x: Node, dim: int, row: Parts, place: int, value: float) -> Node:
    """`x` with what the uneven tiles of one part of a dim add replaced by a value."""
    part = row[place]
    own = [local_size(one, emitter.sizes) for one in row]
    if not part.axes or own[place] * prod(emitter.sizes[axis] for axis in part.axes) == part.size:
        return x
    shape, before, after = list(record(x).shape), prod(own[:place]), prod(own[place + 1 :])
    view, at = x, dim
    if (before, after) != (1, 1):
        view, at = emitter.emit(aten.reshape.default, x, [*shape[:dim], before, own[place], after, *shape[dim + 1 :]]), dim + 1
    dtype = record(x).dtype
    assert dtype is not None
    fill = value if dtype.is_floating_point else as_integer(value, dtype)
    view = emitter.emit(spmd.mask, view, at, emitter.tile(spmd.tile_count, part), fill)
    return view if list(record(view).shape) == shape else emitter.emit(aten.reshape.default, view, shape)
