"""Lowering of one operator: the emitter that a rule's `lower` writes to (each method is described in meshc.rules.rule)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, cast

import torch
from torch.fx import Node

from meshc.ir import records, spmd
from meshc.ir.functions import Function, Target
from meshc.ir.reductions import as_integer
from meshc.ir.schemas import RESHAPES, arguments_by_name, place_of
from meshc.ir.sharding import Part, Sharding, local_shape, local_size
from meshc.ir.spmd import MICROBATCH
from meshc.ir.window import tile_bounds, tile_length
from meshc.passes.partition.builder import Builder
from meshc.passes.partition.halo import HaloWindow
from meshc.passes.partition.reasons import plan_lines, value_text
from meshc.passes.phases.factors import Instance, Token
from meshc.private import OpOverload
from meshc.rules.layout import PERMUTATIONS
from meshc.rules.rule import CPU, Extents, Local, Made, Turns

aten = torch.ops.aten

EXPANDING: Final = {
    *RESHAPES, aten.expand.default, aten.unsqueeze.default, aten.clone.default, aten.permute.default, aten.transpose.int
}
"""Layout operators that may expand a value."""


class Lowering(Local):
    """Lowers one operator into `build`, with factors split as in `chosen`."""

    def __init__(
        self,
        build: Builder,
        instance: Instance,
        operands: Sequence[Node],
        results: Sequence[Sharding],
        chosen: dict[Token, tuple[str, ...]],
        uses_zigzag: bool = False,
        turns: Turns | None = None,
        is_in_zigzag: bool = False,
    ) -> None:
        self.build, self.instance, self.node, self.rule = build, instance, instance.node, instance.rule
        self.operands, self.results, self.chosen = list(operands), list(results), chosen
        self.uses_zigzag, self.is_in_zigzag = uses_zigzag, is_in_zigzag
        self.turns, self.parts = turns, 1 if turns is None else turns.parts
        self.reordered_values = build.arranged

    def lower(self) -> Made:
        """Emits the operator as its rule lowers it, or else as it is."""
        return self.call(*self.operands) if self.rule.lower is None else self.rule.lower(self)

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
        return [self._part(token) for token in sorted(self.instance.size) if token[0] == letter]

    def _part(self, token: Token) -> Part:
        return Part(token[0], self.instance.size[token], self.chosen.get(token, ()))

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

    def positions(self, letter: str, dtype: torch.dtype = torch.int64, device: torch.device = CPU) -> Node:
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
        assert found is not None
        return found if len(parts) == 1 else self.emit(aten.reshape.default, found, [self.local_size(letter)])

    def tiles(self, index: int) -> Extents:
        return self._extents((part, 0) for row in self._whole_batch_parts(map(list, self.results[index].dims)) for part in row)

    def tile(self, letters: Sequence[str]) -> Extents:
        return self._extents((part, 0) for letter in letters for part in self._parts(letter) or [Part(letter, 1)])

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> Extents:
        rows = self._whole_batch_parts(self._parts(letter) or [Part(letter, 1)] for letter in letters)
        return self._extents((part, back.get(letter, 0)) for letter, row in zip(letters, rows, strict=True) for part in row)

    def _extents(self, parts: Iterable[tuple[Part, int]]) -> Extents:
        """Of parts, each of the rank so many places before this one."""
        given = list(parts)
        return {
            "global_shape": [part.size for part, _ in given],
            "local_shape": [local_size(part, self.build.sizes) for part, _ in given],
            "offsets": [self._number(spmd.tile_start, part, back) if part.axes else 0 for part, back in given],
        }

    def _whole_batch_parts(self, rows: Iterable[list[Part]]) -> list[list[Part]]:
        """The parts of each dim, that of the batch extended to the whole batch, if the operator draws for one microbatch of several."""
        dims = list(rows)
        whole, mine = (self.node.args[place_of(self.node, name)] for name in ("global_shape", "local_shape"))
        for row, large, small in zip(dims, whole, mine, strict=True):  # type: ignore[arg-type]
            if large != small:
                first = row[0] if row else Part("batch", 1)
                row[:1] = [Part(first.factor, first.size * self.build.sizes[MICROBATCH], (MICROBATCH, *first.axes))]
        return dims

    def all_reduce(self, x: Node, axes: Sequence[str], reduction: str) -> Node:
        return self.emit(spmd.all_reduce, x, list(axes), reduction, reason=self._reason(axes, "over split"))

    def all_gather(self, x: Node, axes: Sequence[str], dim: int) -> Node:
        return self.emit(spmd.all_gather, x, list(axes), dim, reason=self._reason(axes, "over split"))

    def _reason(self, axes: Sequence[str], how: str) -> str:
        """The reason of a collective: the operator, how it goes along the factors of the operands that the axes split, the plan's lines."""
        shardings = [found.sharding for x in self.operands for found in records(x) if found.sharding is not None]
        parts = [part for sharding in shardings for _, _, part in sharding.parts()]
        factors = " and ".join(dict.fromkeys(part.factor for part in parts if set(part.axes) & set(axes))) or "dims"
        return f"{value_text(self.node, {})}, {how} {factors}{plan_lines(axes, self.build.entries)}"

    def index(self, axes: Sequence[str]) -> Node:
        return self.build.index(axes)

    def ranks(self, axes: Sequence[str]) -> int:
        return prod(self.build.sizes[axis] for axis in axes)

    def place(self, axis: str, back: int) -> Node:
        return self.build.place(axis, back)

    def ring_shift(self, x: Node, axes: Sequence[str], steps: int) -> Node:
        return self.emit(spmd.ring_shift, x, list(axes), steps, reason=self._reason(axes, "block by block of"))

    def reorder_tiles(self, x: Node, axes: Sequence[str], dim: int, home: bool) -> Node:
        return self.build.emit_zigzag(x, dim, axes, home, self._reason(axes, "in zigzag order of"))

    def hand_on(self, x: Node, axes: Sequence[str], dim: int, back: bool) -> Node:
        ranks, reason = self.ranks(axes), self._reason(axes, "the state along")
        return self.emit(spmd.halo, x, list(axes), dim, ranks, [ranks, 1, 1 if back else -1, 1], 0.0, reason=reason)

    def keep_end(self, x: Node, axes: Sequence[str], back: bool) -> Node:
        place, ranks = self.index(axes), self.ranks(axes)
        return self.emit(spmd.keep_first, x, place if back else self.emit(spmd.ring_place, place, ranks - 1, ranks))

    def call(self, *operands: Node, **changed: object) -> Node:
        node, (args, kwargs) = self.node, self._with_operands(operands)
        if changed:
            named = arguments_by_name(cast(OpOverload, node.target), args, kwargs) | changed
            args = [*named.values()][: max(len(args), *(place_of(node, name) + 1 for name in changed))]
        return self.emit(node.target, *args, **kwargs)

    def arguments(self) -> dict[str, Any]:
        return arguments_by_name(cast(OpOverload, self.node.target), *self._with_operands(self.operands))

    def _with_operands(self, operands: Iterable[Node]) -> tuple[list[Any], dict[str, Any]]:
        """The operator's arguments, with these operands in place of its own."""
        rest = iter(operands)

        def local(argument: object) -> Any:
            if isinstance(argument, Node):
                return next(rest)
            return list(map(local, argument)) if isinstance(argument, list | tuple) else argument

        return list(map(local, self.node.args)), {key: local(argument) for key, argument in self.node.kwargs.items()}

    def window(self, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
        if (place := self._halo_window(letter)) is None:
            return x
        here = place.window_offset()
        if here is None:
            where = [place.size, list(place.window), float(fill)]
            return self.emit(spmd.halo, x, list(place.axes), dim, *where, reason=self._halo_reason(place, "halo of"))
        if place.size != place.tile * len(tile_bounds(place.size, place.counts)):
            x = self.emit(spmd.mask, x, dim, self.count(self.rule.windows[letter][0]), float(fill))
        length = place.window[3]
        return x if length == place.tile else self.emit(aten.slice.Tensor, x, dim, here, here + length)

    def sum_of_windows(self, x: Node, dim: int, letter: str) -> Node:
        if (place := self._halo_window(letter)) is None:
            return x
        here = place.window_offset()
        if here is None:
            reason = self._halo_reason(place, "sums at the edges of")
            return self.emit(spmd.halo_sum, x, list(place.axes), dim, place.size, list(place.window), reason=reason)
        after = place.tile - here - place.window[3]
        if not here and not after:
            return x
        return self.emit(aten.constant_pad_nd.default, x, [0, 0] * (len(self.shape(x)) - 1 - dim) + [here, after], 0)

    def window_start(self, letter: str) -> Node | int:
        start, stride = self.start(letter), self.rule.windows[letter][1].stride
        return start if stride == 1 or start == 0 else self.emit(spmd.tile_start, stride * 2, [2], [start])

    def _halo_window(self, letter: str) -> HaloWindow | None:
        """The windows of a letter's tiles; None if it is not split."""
        axes = self.axes(letter)
        if not axes:
            return None
        other, found = self.rule.windows[letter]
        counts, over = tuple(self.build.sizes[axis] for axis in axes), self.global_size(letter)
        window = (over, found.stride, found.offset, found.length(tile_length(over, counts)))
        return HaloWindow(axes, counts, self.global_size(other), window)

    def _halo_reason(self, place: HaloWindow, what: str) -> str:
        return f"{what} {value_text(self.node, {})}{plan_lines(place.axes, self.build.entries)}"

    def before_expansion(self, x: Node, turned: bool) -> tuple[Node, Callable[[Node], Node]]:
        small, least = x, prod(self.shape(x))
        chain: list[Node] = []
        layout: list[Node] = []
        while x.target in EXPANDING and len(x.all_input_nodes) == 1:
            (before,) = x.all_input_nodes
            if not turned and (x.target in PERMUTATIONS or self.shape(before)[-2:] != self.shape(x)[-2:]):
                break
            chain.append(x)
            x = before
            if prod(self.shape(x)) < least:
                small, least, layout = x, prod(self.shape(x)), chain[::-1]

        def expand(value: Node) -> Node:
            for node in layout:
                value = self.emit(node.target, value, *node.args[1:], **node.kwargs)
            return value

        return small, expand

    def keep_first(self, x: Node, axes: Sequence[str]) -> Node:
        for axis in axes:
            x = self.emit(spmd.keep_first, x, self.build.coordinate(axis))
        return x

    def neutralise(self, x: Node, letter: str, value: float, index: int = 0) -> Node:
        shape = Sharding(tuple(tuple(map(self._part, tokens)) for tokens in self.instance.operands[index]))
        for dim, position, part in shape.parts():
            if part.factor == letter:
                x = mask_part(self.build, x, shape, (dim, position), value)
        return x


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
