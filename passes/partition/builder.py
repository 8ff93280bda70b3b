"""Builds the per-rank graph: emits nodes with their local shape and dtype, and the integers that stand for a rank's place."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc import spmd
from meshc.ir import Record, Source, set_record
from meshc.sharding import Part, Sharding
from meshc.window import tile_length

aten = torch.ops.aten


class Builder:
    """Emits into `graph`. `shape(node)` and `dtype(node)` are local; they come from running the operator on meta tensors.

    `entries` are the plan's, by axis, for reasons.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.graph = Graph()
        self.sizes = sizes
        self.meta: dict[Node, Any] = {}
        self.context = Record()
        self.entries: Mapping[str, str] = {}
        self._integers: dict[Any, Node] = {}

    def placeholder(self, name: str, record: Record) -> Node:
        node = self.graph.placeholder(name)
        set_record(node, record)
        self.meta[node] = torch.empty(record.shape, dtype=record.dtype, device="meta") if record.dtype else 0
        return node

    def shape(self, node: Node) -> tuple[int, ...]:
        return tuple(self.meta[node].shape)

    def dtype(self, node: Node) -> torch.dtype:
        found: torch.dtype = self.meta[node].dtype
        return found

    def emit(self, target: Any, *args: Any, sharding: Sharding | None = None, reason: str | None = None, **kwargs: Any) -> Node:
        """A call; its record has the shape and dtype that the call gives on meta tensors."""
        node = self.graph.call_function(target, args, kwargs)
        result = self._evaluate(target, args, kwargs)
        self.meta[node] = result
        changes = {"sharding": sharding} if reason is None else {"sharding": sharding, "reason": reason}
        if isinstance(result, list | tuple):
            set_record(node, tuple(self._record(item, {}) for item in result))
        else:
            set_record(node, self._record(result, changes))
        return node

    def _record(self, result: Any, changes: dict[str, Any]) -> Record:
        base = replace(self.context, sharding=None)
        if isinstance(result, torch.Tensor):
            return replace(base, shape=tuple(result.shape), dtype=result.dtype, **changes)
        return replace(base, shape=(), dtype=None, **changes)

    def item(self, node: Node, index: int) -> Node:
        """One result of a node with several."""
        return self.emit(operator.getitem, node, index)

    def _evaluate(self, target: Any, args: Any, kwargs: Any) -> Any:
        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return self.meta[argument]
            if isinstance(argument, list | tuple):
                return type(argument)(value(item) for item in argument)
            return argument

        args, kwargs = value(args), {key: value(item) for key, item in kwargs.items()}
        name = getattr(target, "__name__", "")
        if spmd.is_collective(target):
            return self._collective(name, *args)
        if target in spmd.INTEGERS.values():
            return 0
        if target is spmd.shard:
            x, dim, tiles, _ = args
            shape = list(x.shape)
            shape[dim] = -(-shape[dim] // tiles)
            return x.new_empty(shape)
        if target in (spmd.mask, spmd.keep_first):
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = "meta"
            kwargs.pop("pin_memory", None)
        return target(*args, **kwargs)

    def _collective(self, name: str, x: torch.Tensor, axes: Sequence[str], *rest: Any) -> torch.Tensor:
        count = 1
        for axis in axes:
            count *= self.sizes[axis]
        shape = list(x.shape)
        if name == "all_gather":
            shape[rest[0]] *= count
        elif name == "reduce_scatter":
            shape[rest[0]] //= count
        elif name == "all_to_all":
            shape[rest[0]] //= count
            shape[rest[1]] *= count
        elif name == "halo":
            shape[rest[0]] = rest[2][3]
        elif name == "halo_sum":
            shape[rest[0]] = tile_length(rest[1], [self.sizes[axis] for axis in axes])
        return x.new_empty(shape)

    # ------------------------------------------------------------------------------------------------------------------ integers

    def coordinate(self, axis: str) -> Node:
        return self._integer(("coordinate", axis), spmd.coordinate, axis)

    def index(self, axes: Sequence[str]) -> Node:
        """Row-major index of this rank among the tiles of `axes`."""
        if len(axes) == 1:
            return self.coordinate(axes[0])
        counts = [self.sizes[axis] for axis in axes]
        total = 1
        for count in counts:
            total *= count
        return self._integer(("index", tuple(axes)), spmd.tile_start, total, counts, [self.coordinate(axis) for axis in axes])

    def tile_start(self, part: Part) -> Node | int:
        return self._tile(spmd.tile_start, part) if part.axes else 0

    def tile_count(self, part: Part) -> Node | int:
        return self._tile(spmd.tile_count, part) if part.axes else part.size

    def _tile(self, function: Any, part: Part) -> Node:
        counts = [self.sizes[axis] for axis in part.axes]
        key = (function.__name__, part.size, part.axes)
        return self._integer(key, function, part.size, counts, [self.coordinate(axis) for axis in part.axes])

    def _integer(self, key: Any, function: Any, *args: Any) -> Node:
        if key not in self._integers:
            context, self.context = self.context, Record(source=Source())
            self._integers[key] = self.emit(function, *args)
            self.context = context
        return self._integers[key]
