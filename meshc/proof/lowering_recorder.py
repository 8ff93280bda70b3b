"""Recorder of what a rule's lowering writes for an operator, for a comparison with a program's lines.

It is the prover's own `Local`, emits into a graph that nothing runs, and has nothing of the pass that has written the program: of what it
does both take only how shapes are found (`meshc/ir/open_shapes.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Node

from meshc.ir import record, records, spmd
from meshc.ir.functions import Target
from meshc.ir.likeness import like
from meshc.ir.schemas import arguments_by_name, place_of
from meshc.ir.sharding import local_shape
from meshc.private import OpOverload
from meshc.proof.emitter import Emitter, mask_padding
from meshc.proof.recorded_letters import Letters
from meshc.proof.recorded_windows import RecordedWindows
from meshc.proof.tiles import fuse_digits
from meshc.rules.rule import Made, Turns

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweringWay:
    """How an operator is lowered, where a rule has several ways."""

    uses_zigzag: bool = False
    is_in_zigzag: bool = False
    turns: Turns | None = None


class RecordedLowering(RecordedWindows):
    def __init__(self, emitter: Emitter, letters: Letters, operands: Sequence[Node], way: LoweringWay = LoweringWay()) -> None:
        self.emitter, self.sizes = emitter, emitter.sizes
        self.node, self.rule, self._letters = letters.node, letters.rule, letters
        self.operands = list(operands)
        self.uses_zigzag, self.is_in_zigzag, self.turns = way.uses_zigzag, way.is_in_zigzag, way.turns
        self.parts = 1 if way.turns is None else way.turns.parts
        self.reordered_values = {}

    def lower(self) -> Made:
        return self.call(*self.operands) if self.rule.lower is None else self.rule.lower(self)

    def emit(self, target: Target, *args: Any, **kwargs: Any) -> Node:
        return self.emitter.emit(target, *args, **kwargs)

    def call(self, *operands: Node, **changed: object) -> Node:
        args, kwargs = self._with_operands(operands)
        if changed:
            named = arguments_by_name(cast(OpOverload, self.node.target), args, kwargs) | changed
            args = [*named.values()][: max(len(args), *(place_of(self.node, name) + 1 for name in changed))]
        return self.emit(self.node.target, *args, **kwargs)

    def arguments(self) -> dict[str, Any]:
        return arguments_by_name(cast(OpOverload, self.node.target), *self._with_operands(self.operands))

    def _with_operands(self, operands: Iterable[Node]) -> tuple[list[Any], dict[str, Any]]:
        rest = iter(operands)

        def on_rank(argument: object) -> Any:
            if isinstance(argument, Node):
                return next(rest)
            return [on_rank(one) for one in argument] if isinstance(argument, list | tuple) else argument

        return [on_rank(one) for one in self.node.args], {name: on_rank(one) for name, one in self.node.kwargs.items()}

    def item(self, value: Node, index: int) -> Node:
        return self.emit(operator.getitem, value, index)

    def shape(self, x: Node) -> tuple[int, ...]:
        return record(x).shape

    def dtype(self, x: Node) -> torch.dtype:
        found = record(x).dtype
        assert found is not None
        return found

    def out_shape(self, index: int) -> tuple[int, ...]:
        sharding = self._letters.results[index]
        return records(self.node)[index].shape if sharding is None else local_shape(sharding, self.sizes)

    def index(self, axes: Sequence[str]) -> Node:
        return self.emitter.index(axes)

    def ranks(self, axes: Sequence[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def place(self, axis: str, back: int) -> Node:
        return self.emitter.place(axis, back)

    def all_reduce(self, x: Node, axes: Sequence[str], reduction: str) -> Node:
        return self.emit(spmd.all_reduce, x, list(axes), reduction)

    def all_gather(self, x: Node, axes: Sequence[str], dim: int) -> Node:
        return self.emit(spmd.all_gather, x, list(axes), dim)

    def ring_shift(self, x: Node, axes: Sequence[str], steps: int) -> Node:
        return self.emit(spmd.ring_shift, x, list(axes), steps)

    def reorder_tiles(self, x: Node, axes: Sequence[str], dim: int, home: bool) -> Node:
        return self.emit(spmd.from_zigzag if home else spmd.to_zigzag, x, list(axes), dim)

    def hand_on(self, x: Node, axes: Sequence[str], dim: int, back: bool) -> Node:
        count = self.ranks(axes)
        return self.emit(spmd.halo, x, list(axes), dim, count, [count, 1, 1 if back else -1, 1], 0.0)

    def keep_end(self, x: Node, axes: Sequence[str], back: bool) -> Node:
        place, count = self.index(axes), self.ranks(axes)
        return self.emit(spmd.keep_first, x, place if back else self.emit(spmd.ring_place, place, count - 1, count))

    def before_expansion(self, x: Node, turned: bool) -> tuple[Node, Callable[[Node], Node]]:
        """By positions: those that are 0 apart have been repeated."""
        tiles = self.emitter.tiles.get(x)
        if tiles is None or not any(stride == 0 for dim in tiles.dims for stride, _ in dim):
            return x, lambda small: small
        whole = [extent for dim in tiles.dims for _, extent in dim or ((0, 1),)]
        apart = [1 if stride == 0 else extent for dim in tiles.dims for stride, extent in dim or ((0, 1),)]
        first = replace(tiles, dims=tuple(fuse_digits(digit for digit in dim if digit[0]) for dim in tiles.dims))
        small = self.emitter.operand(f"{x.name}_small", like(record(x), shape=first.shape, sharding=None))
        self.emitter.tiles[small] = first

        def expand(value: Node) -> Node:
            value = self.emit(aten.expand.default, self.emit(aten.reshape.default, value, apart), whole)
            return self.emit(aten.reshape.default, value, list(tiles.shape))

        return small, expand

    def keep_first(self, x: Node, axes: Sequence[str]) -> Node:
        for axis in axes:
            x = self.emit(spmd.keep_first, x, self.emitter.coordinate(axis))
        return x

    def neutralise(self, x: Node, letter: str, value: float, index: int = 0) -> Node:
        rows = [self._parts(one) for one in self.rule.operands[index]]
        for dim, (one, row) in enumerate(zip(self.rule.operands[index], rows, strict=True)):
            if one == letter:
                for place in range(len(row)):
                    x = mask_padding(self.emitter, x, dim, row, place, value)
        return x
