"""Lowering of one operator: the emitter that a rule's `lower` writes to (each method is described in meshc.rules.local)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.ir import records, spmd
from meshc.ir.functions import Function, Target
from meshc.ir.reductions import as_integer
from meshc.ir.schemas import place_of
from meshc.ir.sharding import Part, Sharding, local_shape, local_size
from meshc.ir.spmd import MICROBATCH
from meshc.passes.partition import halo
from meshc.passes.partition.builder import Builder
from meshc.passes.partition.reasons import plan_lines, value_text
from meshc.passes.phases.factors import Instance, Token
from meshc.rules.local import Local
from meshc.rules.rule import Rule, Turns

aten = torch.ops.aten


class Lowering(Local):
    """Lowers one operator into `build`, with factors split as in `chosen`."""

    def __init__(
        self,
        build: Builder,
        instance: Instance,
        operands: Sequence[Node],
        results: Sequence[Sharding],
        chosen: dict[Token, tuple[str, ...]],
        reason: str,
        in_zigzag: bool = False,
        in_turns: Turns | None = None,
        in_order: bool = False,
    ) -> None:
        self.build = build
        self.instance = instance
        self.operands = list(operands)
        self.results = list(results)
        self.chosen = chosen
        self.reason = reason
        self.in_zigzag = in_zigzag
        self.in_turns = in_turns
        self.in_order = in_order

    @property
    def node(self) -> Node:
        return self.instance.node

    @property
    def rule(self) -> Rule:
        return self.instance.rule

    def emit(self, target: Target, *args: Any, **kwargs: Any) -> Node:
        return self.build.emit(target, *args, **kwargs)

    def item(self, value: Node, index: int) -> Node:
        return self.build.item(value, index)

    def shape(self, x: Node) -> tuple[int, ...]:
        return self.build.shape(x)

    def dtype(self, x: Node) -> torch.dtype:
        return self.build.dtype(x)

    def out_shape(self, index: int) -> tuple[int, ...]:
        return local_shape(self.results[index], self.build.sizes)

    def _parts(self, letter: str) -> list[Part]:
        tokens = sorted(token for token in self.instance.size if token[0] == letter)
        return [Part(letter, self.instance.size[token], self.chosen.get(token, ())) for token in tokens]

    def letters(self) -> set[str]:
        return {letter for letter, _ in self.instance.size}

    def axes(self, letter: str) -> tuple[str, ...]:
        return tuple(axis for part in self._parts(letter) for axis in part.axes)

    def global_size(self, letter: str) -> int:
        return prod(part.size for part in self._parts(letter))

    def local_size(self, letter: str) -> int:
        return prod(local_size(part, self.build.sizes) for part in self._parts(letter))

    def has_whole_groups(self, letter: str, count: int) -> bool:
        whole = 1
        for part in reversed(self._parts(letter)):
            if whole >= count:
                break
            if part.axes:
                return False
            whole *= part.size
        return whole % count == 0

    def start(self, letter: str, back: int = 0) -> Node | int:
        parts = self._parts(letter)
        if any(part.axes for part in parts[1:]):
            raise ValueError(f"{self.node.name}: only the major factor of {letter} has a start")
        if not parts or not parts[0].axes:
            return 0
        return self._times(self._number(spmd.tile_start, parts[0], back), parts)

    def count(self, letter: str, back: int = 0) -> Node | int:
        parts = self._parts(letter)
        if not parts or not parts[0].axes:
            return self.global_size(letter)
        return self._times(self._number(spmd.tile_count, parts[0], back), parts)

    def _number(self, function: Function, part: Part, back: int) -> Node:
        """`function` of this rank's tile of a part, or of the tile of the rank `back` places before it on the axis."""
        return self.build.tile(function, part, [self.place(axis, back) for axis in part.axes] if back else None)

    def _times(self, number: Node, parts: list[Part]) -> Node:
        unit = prod(part.size for part in parts[1:])
        return number if unit == 1 else self.emit(spmd.tile_start, unit * 2, [2], [number])

    def positions(self, letter: str, dtype: torch.dtype, device: torch.device) -> Node:
        parts = self._parts(letter)
        if not parts:
            return self.emit(aten.arange.default, 1, dtype=dtype, device=device)
        found: Node | None = None
        for index, part in enumerate(parts):
            unit = prod(other.size for other in parts[index + 1 :])
            row = self.emit(aten.arange.default, local_size(part, self.build.sizes), dtype=dtype, device=device)
            if part.axes:
                row = self.emit(aten.add.Tensor, row, self.build.tile_start(part))
            if unit != 1:
                row = self.emit(aten.mul.Tensor, row, unit)
            found = row if found is None else self.emit(aten.add.Tensor, self.emit(aten.unsqueeze.default, found, -1), row)
        if found is None:  # a dim of size 1
            return self.emit(aten.zeros.default, [1], dtype=dtype, device=device)
        return found if len(parts) == 1 else self.emit(aten.reshape.default, found, [self.local_size(letter)])

    def tiles(self, index: int) -> tuple[list[int], list[int], list[Node | int]]:
        parts = self._draw_parts(index)
        return (
            [part.size for part in parts],
            [local_size(part, self.build.sizes) for part in parts],
            [self.build.tile_start(part) for part in parts],
        )

    def tile(self, letters: Sequence[str]) -> tuple[list[int], list[int], list[Node | int]]:
        parts = [part for letter in letters for part in self._parts(letter) or [Part(letter, 1)]]
        local = [local_size(part, self.build.sizes) for part in parts]
        return [part.size for part in parts], local, [self.build.tile_start(part) for part in parts]

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> tuple[list[int], list[int], list[Node | int]]:
        rows = self._whole_batch_parts([self._parts(letter) or [Part(letter, 1)] for letter in letters])
        parts = [(part, back.get(letter, 0)) for letter, row in zip(letters, rows, strict=True) for part in row]
        return (
            [part.size for part, _ in parts],
            [local_size(part, self.build.sizes) for part, _ in parts],
            [self._number(spmd.tile_start, part, places) if part.axes else 0 for part, places in parts],
        )

    def _draw_parts(self, index: int) -> list[Part]:
        """The parts of a random result, in the whole batch's draw."""
        return [part for row in self._whole_batch_parts([list(parts) for parts in self.results[index].dims]) for part in row]

    def _whole_batch_parts(self, dims: list[list[Part]]) -> list[list[Part]]:
        """`dims` with the batch part extended to the whole batch, if the operator draws for one microbatch of several."""
        whole, mine = (self.node.args[place_of(self.node, name)] for name in ("global_shape", "local_shape"))
        for rows, large, small in zip(dims, whole, mine, strict=True):  # type: ignore[arg-type]
            if large != small:
                first = rows[0] if rows else Part("batch", 1)
                rows[:1] = [Part(first.factor, first.size * self.build.sizes[MICROBATCH], (MICROBATCH, *first.axes))]
        return dims

    def all_reduce(self, x: Node, axes: Sequence[str], reduction: str) -> Node:
        reason = f"{value_text(self.node, {})}, over split {self._split_factors(axes)}{plan_lines(axes, self.build.entries)}"
        return self.emit(spmd.all_reduce, x, list(axes), reduction, reason=reason)

    def all_gather(self, x: Node, axes: Sequence[str], dim: int) -> Node:
        reason = f"{value_text(self.node, {})}, over split {self._split_factors(axes)}{plan_lines(axes, self.build.entries)}"
        return self.emit(spmd.all_gather, x, list(axes), dim, reason=reason)

    def _split_factors(self, axes: Sequence[str]) -> str:
        """The factors of the operands that the axes split, by name."""
        shardings = [found.sharding for x in self.operands for found in records(x) if found.sharding is not None]
        parts = [part for sharding in shardings for _, _, part in sharding.parts()]
        return " and ".join(dict.fromkeys(part.factor for part in parts if set(part.axes) & set(axes))) or "dims"

    def index(self, axes: Sequence[str]) -> Node:
        return self.build.index(axes)

    def ranks(self, axes: Sequence[str]) -> int:
        return prod(self.build.sizes[axis] for axis in axes)

    def place(self, axis: str, back: int) -> Node:
        return self.build.place(axis, back)

    def ring_shift(self, x: Node, axes: Sequence[str], steps: int) -> Node:
        reason = f"{value_text(self.node, {})}, block by block of {self._split_factors(axes)}{plan_lines(axes, self.build.entries)}"
        return self.emit(spmd.ring_shift, x, list(axes), steps, reason=reason)

    def reorder_tiles(self, x: Node, axes: Sequence[str], dim: int, home: bool) -> Node:
        reason = f"{value_text(self.node, {})}, in zigzag order of {self._split_factors(axes)}{plan_lines(axes, self.build.entries)}"
        return self.build.emit_zigzag(x, dim, axes, home, reason)

    @property
    def reordered_values(self) -> dict[tuple[Node, object], Node]:
        return self.build.arranged

    @property
    def uses_zigzag(self) -> bool:
        return self.in_zigzag

    @property
    def is_in_zigzag(self) -> bool:
        return self.in_order

    @property
    def turns(self) -> Turns | None:
        return self.in_turns

    @property
    def parts(self) -> int:
        return 1 if self.in_turns is None else self.in_turns.parts

    def hand_on(self, x: Node, axes: Sequence[str], dim: int, back: bool) -> Node:
        ranks = self.ranks(axes)
        reason = f"{value_text(self.node, {})}, the state along {self._split_factors(axes)}{plan_lines(axes, self.build.entries)}"
        return self.emit(spmd.halo, x, list(axes), dim, ranks, [ranks, 1, 1 if back else -1, 1], 0.0, reason=reason)

    def keep_end(self, x: Node, axes: Sequence[str], back: bool) -> Node:
        place, ranks = self.index(axes), self.ranks(axes)
        return self.emit(spmd.keep_first, x, place if back else self.emit(spmd.ring_place, place, ranks - 1, ranks))

    def call(self, *operands: Node) -> Node:
        args, kwargs = _substitute(self.node, list(operands))
        return self.emit(self.node.target, *args, **kwargs)

    def window(self, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
        return halo.window(self, x, dim, letter, fill)

    def sum_of_windows(self, x: Node, dim: int, letter: str) -> Node:
        return halo.sum_of_windows(self, x, dim, letter)

    def window_start(self, letter: str) -> Node | int:
        return halo.window_start(self, letter)

    def keep_first(self, x: Node, axes: Sequence[str]) -> Node:
        for axis in axes:
            x = self.emit(spmd.keep_first, x, self.build.coordinate(axis))
        return x

    def neutralise(self, x: Node, letter: str, value: float, index: int = 0) -> Node:
        operand = self.instance.operands[index]
        shape = Sharding(
            tuple(
                tuple(Part(token[0], self.instance.size[token], self.chosen.get(token, ())) for token in tokens)
                for tokens in operand
            )
        )
        for dim, tokens in enumerate(operand):
            for position, token in enumerate(tokens):
                if token[0] == letter:
                    x = mask_part(self.build, x, shape, (dim, position), value)
        return x


def _substitute(node: Node, operands: list[Node]) -> tuple[list[object], dict[str, object]]:
    """The arguments of a global node with its tensors, in order, replaced by local ones."""
    rest = list(operands)

    def visit(argument: object) -> object:
        if isinstance(argument, Node):
            return rest.pop(0)
        if isinstance(argument, list | tuple):
            return [visit(item) for item in argument]
        return argument

    args = [visit(argument) for argument in node.args]
    kwargs = {key: visit(argument) for key, argument in node.kwargs.items()}
    return args, kwargs


def mask_part(build: Builder, x: Node, sharding: Sharding, part: tuple[int, int], value: float) -> Node:
    """`x` with the padding of one part replaced by `value`, by `where`: NaN times zero would be NaN."""
    d, p = part
    item = sharding.dims[d][p]
    local = [local_size(other, build.sizes) for other in sharding.dims[d]]
    if not item.axes or local[p] * prod(build.sizes[a] for a in item.axes) == item.size:
        return x
    before, after = prod(local[:p]), prod(local[p + 1 :])
    shape = list(build.shape(x))
    view, dim = x, d
    if before != 1 or after != 1:
        view = build.emit(aten.reshape.default, x, [*shape[:d], before, local[p], after, *shape[d + 1 :]])
        dim = d + 1
    if not build.dtype(view).is_floating_point:
        value = as_integer(value, build.dtype(view))
    view = build.emit(spmd.mask, view, dim, build.tile_count(item), value)
    return view if view is x or list(build.shape(view)) == shape else build.emit(aten.reshape.default, view, shape)
