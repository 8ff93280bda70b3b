"""Recorder of what a rule's lowering writes for an operator, for a comparison with a program's lines.

It is the prover's own `Local`: it has an operator's letters as parts (a size, and the axes that split it), emits into a graph that nothing
runs, and shares no code with the pass that has written the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from meshc.ir import KEY, Record, comparison_key, is_getitem, record, records, set_record, spmd
from meshc.ir.functions import Function, Target
from meshc.ir.graph import create_call
from meshc.ir.likeness import like
from meshc.ir.open_shapes import OpenShapes
from meshc.ir.reductions import as_integer
from meshc.ir.schemas import arguments_by_name, place_of
from meshc.ir.sharding import Part, Sharding, local_shape, local_size
from meshc.ir.sizes import Size
from meshc.ir.spmd import MICROBATCH
from meshc.ir.window import overlaps, tile_bounds, tile_length
from meshc.private import OpOverload
from meshc.proof.tiles import Tiles, fuse_digits
from meshc.rules.rule import CPU, Extents, Local, Made, Rule, Turns

aten = torch.ops.aten
Parts = tuple[Part, ...]


class Emitter:
    """Emits calls with local shapes and dtypes, found by running operators on tensors without values."""

    def __init__(self, sizes: Mapping[str, int], memo: MutableMapping[object, Any], open_shapes: OpenShapes) -> None:
        self.graph, self.sizes, self._memo, self._open = Graph(), sizes, memo, open_shapes
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
        made = self._meta[node] = tuple(self._run(target, args, kwargs, world) for world in range(len(self._open.worlds)))
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

    def _run(self, target: Function, args: Sequence[Any], kwargs: Mapping[str, Any], world: int) -> Any:
        at = self._open.worlds[world]

        def value(argument: Any) -> Any:
            if isinstance(argument, Node):
                return self._meta[argument][world]
            return type(argument)(map(value, argument)) if isinstance(argument, list | tuple) else at(argument)

        given, named = [value(one) for one in args], {name: value(one) for name, one in kwargs.items()}
        if target in spmd.INTEGERS.values():
            return 0
        if spmd.is_collective(target) or target is spmd.shard:
            return given[0].new_empty(spmd.collective_shape(target, given[0].shape, given[1:], self.sizes))
        if target in (spmd.mask, spmd.keep_first):
            return given[0]
        if "device" in named:
            named["device"] = "meta"
            named.pop("pin_memory", None)
        key = target, _memo_key(given), _memo_key(named)
        if key not in self._memo:
            self._memo[key] = target(*given, **named)
        return self._memo[key]

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


def _memo_key(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(_memo_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _memo_key(one)) for name, one in sorted(argument.items()))
    return comparison_key(argument)


@dataclass(frozen=True)
class Letters:
    """An operator's letters, solved for one call.

    parts    of each letter; no letter stands for a dim of size 1
    results  the sharding of each result
    """

    node: Node
    rule: Rule
    parts: Mapping[str, Parts]
    results: tuple[Sharding | None, ...]


@dataclass(frozen=True)
class LoweringWay:
    """How an operator is lowered, where a rule has several ways."""

    uses_zigzag: bool = False
    is_in_zigzag: bool = False
    turns: Turns | None = None


class RecordedLowering(Local):
    def __init__(self, emitter: Emitter, letters: Letters, operands: Sequence[Node], way: LoweringWay = LoweringWay()) -> None:
        self.emitter, self.sizes = emitter, emitter.sizes
        self.node, self.rule, self._letters = letters.node, letters.rule, letters
        self.operands = list(operands)
        self.uses_zigzag, self.is_in_zigzag, self.turns = way.uses_zigzag, way.is_in_zigzag, way.turns
        self.parts = 1 if way.turns is None else way.turns.parts
        self.reordered_values = {}

    def lower(self) -> Made:
        return self.call(*self.operands) if self.rule.lower is None else self.rule.lower(self)

    # ------------------------------------------------------------------------------------------------------------------ letters

    def _parts(self, letter: str) -> Parts:
        return self._letters.parts.get(letter, ())

    def letters(self) -> set[str]:
        return {letter for letter, parts in self._letters.parts.items() if parts}

    def axes(self, letter: str) -> tuple[str, ...]:
        return tuple(axis for part in self._parts(letter) for axis in part.axes)

    def global_size(self, letter: str) -> int:
        return prod(part.size for part in self._parts(letter))

    def local_size(self, letter: str) -> int:
        return prod(local_size(part, self.sizes) for part in self._parts(letter))

    def has_whole_groups(self, letter: str, count: int) -> bool:
        minor = 1
        for part in self._parts(letter)[::-1]:
            if minor >= count:
                break
            if part.axes:
                return False
            minor *= part.size
        return minor % count == 0

    def start(self, letter: str, back: int = 0) -> Node | int:
        first, *rest = self._parts(letter) or (Part(letter, 1),)
        if any(part.axes for part in rest):
            raise ValueError(f"only the major part of {letter} has a start")
        return self._in_positions(self.emitter.tile(spmd.tile_start, first, back), rest) if first.axes else 0

    def count(self, letter: str, back: int = 0) -> Node | int:
        first, *rest = self._parts(letter) or (Part(letter, 1),)
        return self._in_positions(self.emitter.tile(spmd.tile_count, first, back), rest) if first.axes else self.global_size(letter)

    def _in_positions(self, number: Node, minor: Sequence[Part]) -> Node:
        each = prod(part.size for part in minor)
        return number if each == 1 else self.emit(spmd.tile_start, 2 * each, [2], [number])

    def positions(self, letter: str, dtype: torch.dtype = torch.int64, device: torch.device = CPU) -> Node:
        parts = self._parts(letter)
        found: Node | None = None
        for at, part in enumerate(parts):
            here = self.emit(aten.arange.default, local_size(part, self.sizes), dtype=dtype, device=device)
            if part.axes:
                here = self.emit(aten.add.Tensor, here, self.emitter.tile(spmd.tile_start, part))
            if (each := prod(minor.size for minor in parts[at + 1 :])) != 1:
                here = self.emit(aten.mul.Tensor, here, each)
            if found is not None:
                here = self.emit(aten.add.Tensor, self.emit(aten.unsqueeze.default, found, -1), here)
            found = here
        if found is None:
            return self.emit(aten.arange.default, 1, dtype=dtype, device=device)
        return found if len(parts) == 1 else self.emit(aten.reshape.default, found, [self.local_size(letter)])

    # ------------------------------------------------------------------------------------------------------------------- tiles

    def tiles(self, index: int) -> Extents:
        sharding = self._letters.results[index]
        assert sharding is not None
        return self._extents((part, 0) for row in self._of_whole_batch([list(parts) for parts in sharding.dims]) for part in row)

    def tile(self, letters: Sequence[str]) -> Extents:
        return self._extents((part, 0) for letter in letters for part in self._parts(letter) or (Part(letter, 1),))

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> Extents:
        rows = self._of_whole_batch([list(self._parts(letter)) or [Part(letter, 1)] for letter in letters])
        return self._extents((part, back.get(letter, 0)) for letter, row in zip(letters, rows, strict=True) for part in row)

    def _extents(self, rows: Iterable[tuple[Part, int]]) -> Extents:
        parts = list(rows)
        starts = [self.emitter.tile(spmd.tile_start, part, back) if part.axes else 0 for part, back in parts]
        shape = [local_size(part, self.sizes) for part, _ in parts]
        return {"global_shape": [part.size for part, _ in parts], "local_shape": shape, "offsets": starts}

    def _of_whole_batch(self, rows: list[list[Part]]) -> list[list[Part]]:
        """Rows of parts, the batch's with the positions of all microbatches where the call draws for one of several."""
        whole, mine = (cast(list[int], self.node.args[place_of(self.node, name)]) for name in ("global_shape", "local_shape"))
        for row, large, small in zip(rows, whole, mine, strict=True):
            if large != small:
                first = row[0] if row else Part("batch", 1)
                row[:1] = [Part(first.factor, first.size * self.sizes[MICROBATCH], (MICROBATCH, *first.axes))]
        return rows

    # -------------------------------------------------------------------------------------------------------------------- calls

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

    # -------------------------------------------------------------------------------------------------------------- collectives

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

    # ------------------------------------------------------------------------------------------------------------------ windows

    def window(self, x: Node, dim: int, letter: str, fill: float = 0.0) -> Node:
        if (found := self._windows(letter)) is None:
            return x
        axes, size, tile, counts, window, here = found
        if here is None:
            return self.emit(spmd.halo, x, list(axes), dim, size, list(window), float(fill))
        if size != tile * len(tile_bounds(size, counts)):
            x = self.emit(spmd.mask, x, dim, self.count(self.rule.windows[letter][0]), float(fill))
        return x if window[3] == tile else self.emit(aten.slice.Tensor, x, dim, here, here + window[3])

    def sum_of_windows(self, x: Node, dim: int, letter: str) -> Node:
        if (found := self._windows(letter)) is None:
            return x
        axes, size, tile, _, window, here = found
        if here is None:
            return self.emit(spmd.halo_sum, x, list(axes), dim, size, list(window))
        after = tile - here - window[3]
        if not here and not after:
            return x
        return self.emit(aten.constant_pad_nd.default, x, [0, 0] * (len(self.shape(x)) - 1 - dim) + [here, after], 0)

    def window_start(self, letter: str) -> Node | int:
        start, stride = self.start(letter), self.rule.windows[letter][1].stride
        return start if stride == 1 or start == 0 else self.emit(spmd.tile_start, stride * 2, [2], [start])

    def _windows(self, letter: str) -> tuple[tuple[str, ...], int, int, tuple[int, ...], tuple[int, int, int, int], int | None] | None:
        """(axes, size, tile, counts, window, where a rank's window starts in its own tile if it is inside); None if nothing is split."""
        axes = self.axes(letter)
        if not axes:
            return None
        other, found = self.rule.windows[letter]
        counts, over = tuple(self.sizes[axis] for axis in axes), self.global_size(letter)
        window = (over, found.stride, found.offset, found.length(tile_length(over, counts)))
        size = self.global_size(other)
        return axes, size, tile_length(size, counts), counts, window, start_inside(window, size, counts)


def start_inside(window: tuple[int, int, int, int], size: int, counts: Sequence[int]) -> int | None:
    """Where every rank's window starts in its own tile, if all are inside at one place, and nobody reads what is beyond; else None. Of open
    sizes nobody knows."""
    if any(isinstance(number, Size) for number in (size, *window)):
        return None
    over, stride, offset, length = window
    tile = tile_length(size, counts)
    rows = list(zip(tile_bounds(over, counts), tile_bounds(size, counts), strict=False))
    found = {start * stride + offset - own for (start, _), (own, _) in rows}
    place = found.pop() if len(found) == 1 else None
    if place is None or place < 0 or place + length > tile:
        return None
    return place if all(part.owner == part.reader for part in overlaps(size, counts, window)) else None


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

