"""Result of a call, by what is known of its operands: tiles moved, or else a new term.

    reshape(x, [8, 4])                 x's elements: the same root, other dims
    all_gather(x, ["dp"], 0)           x, no longer split over dp
    mm(x, w)                           a new root: a term of mm and both operands' tiles

The traced graph, the program's lines and the lines of a rule's lowering are all walked by it, so that equal lines give equal tiles. A root
is *known* if it is a value of the traced graph: then what its axes say holds of it on all ranks. Of any other root nothing is known but
the calls that made it; collectives and tiles of those are terms, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch.fx import Node

from meshc.ir import KEY, is_getitem, records, spmd
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.schemas import named_arguments
from meshc.ir.sharding import ZIGZAG, tile_sizes
from meshc.ir.sizes import Ratio, Size
from meshc.ops import block_codes as _coded  # noqa: F401 - registers its operators
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops.state_rounding import IN_PLACE
from meshc.proof import compacted_rows, divided, joined_values, moves
from meshc.proof.chunks import chunks_of, is_of_chunks, name_of_chunks
from meshc.proof.held import Held, Integer, JoinedValues, Several
from meshc.proof.terms import TermTable, arguments
from meshc.proof.tiles import (
    END,
    Digit,
    Dim,
    Dims,
    Tiles,
    Unfit,
    digits_of_axes,
    dims_of_shape,
    fuse_digits,
    lengthen_dim,
    major_digits,
    with_dim,
)
from meshc.proof.uneven import (
    ADDED,
    REPEATED,
    Row,
    added_to,
    counts_elements,
    dims_of,
    in_order,
    is_of_digit,
    row_of_axis,
    row_of_dim,
    rows_of_longer,
)
from meshc.rules.elementwise import is_pointwise

aten, meshc = torch.ops.aten, torch.ops.meshc

SAME: Final = {
    aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default, aten.contiguous.default,
    meshc.check_index.default, spmd.to_host, spmd.from_host,
}  # fmt: skip
"""Calls whose result is their operand, elsewhere or looked at."""
WITHOUT_WRITING: Final[Mapping[Any, Any]] = {twin: one for one, twin in IN_PLACE.items()}
"""Operator that writes its result into its first operand -> the one that returns it."""


TOLD: Final[Mapping[Any, int]] = {
    meshc.bounded_choices.default: 6, aten.convolution_backward.default: 10, aten.native_layer_norm_backward.default: 7,
    aten.native_group_norm_backward.default: 8, aten.native_batch_norm_backward.default: 9,
}  # fmt: skip
"""Operator -> the place of an argument that changes no result: a name for messages, or which results are computed at all."""
MAXIMUM: Final = 2
"""The mode of bags whose backward reads which rows were the largest."""


def _place_without_effect(node: Node) -> int | None:
    """The place of an argument that changes no result of a call."""
    if node.target is aten._embedding_bag_backward.default:
        return 5 if named_arguments(node)["mode"] != MAXIMUM else None
    return TOLD.get(node.target)


FILLS: Final[Mapping[Any, int]] = {
    aten.full.default: 1, aten.new_full.default: 2, aten.full_like.default: 1, aten.zeros.default: 0, aten.new_zeros.default: 0,
    aten.zeros_like.default: 0, aten.ones.default: 1, aten.new_ones.default: 1, aten.ones_like.default: 1,
}  # fmt: skip
"""Operators that fill a tensor with one number: it, or of those that are given it its place."""


def _filled_number(node: Node) -> float | None:
    """The number with which a call fills a tensor; None for other calls."""
    found: Any = FILLS.get(node.target)
    if found is not None and "full" in str(node.target):
        found = node.args[found] if len(node.args) > found else node.kwargs.get("fill_value")
    if isinstance(found, Size | Ratio):
        return found
    return float(found) if isinstance(found, int | float) else None


def _dtype_of_fill(node: Node) -> object:
    """The dtype of a call that fills a tensor; where it names none, torch's default, whatever that is."""
    by_default = node.target in (aten.zeros.default, aten.ones.default, aten.full.default) and node.kwargs.get("dtype") is None
    return "default" if by_default else records(node)[0].dtype


def repeat_root(root: int, shape: Sequence[int]) -> Tiles:
    """The one position of a root as every element of a tensor."""
    return Tiles(root, tuple(fuse_digits([(0, size)]) for size in shape))


class Evaluator:
    """
    sizes   of the mesh's axes
    known   roots that are values of the traced graph
    numel   number of positions of a root
    traced  whether the graph is the traced one
    """

    def __init__(self, terms: TermTable, sizes: Mapping[str, int], known: set[int], numel: dict[int, int], traced: bool = False) -> None:
        self.terms, self.sizes, self.known, self.numel, self.traced = terms, dict(sizes), known, numel, traced

    def call(self, node: Node, of: Callable[[Node], Held]) -> Held:
        """What a call gives; `of`: what is known of its operands."""
        made = self._call(node, of)
        return self.one_empty(made, records(node)[0].dtype) if isinstance(made, Tiles) else made

    def one_empty(self, x: Tiles, dtype: object) -> Tiles:
        """Values without elements are one value: each is any other of its shape."""
        if 0 not in x.shape:
            return x
        root = self.terms.number("empty", str(dtype))
        self.numel[root] = 0
        self.known.add(root)
        return Tiles(root, dims_of_shape(x.shape))

    def _call(self, node: Node, of: Callable[[Node], Held]) -> Held:
        target = node.target
        try:
            if (on_ranks := divided.call(self, node, of)) is not None:
                return on_ranks
            if target is aten.stack.default:
                return divided.stack(self, node, of)
        except Unfit:
            return self.opaque(node, of)
        if is_getitem(node):
            if node.args[0].target is compacted_rows.USED:  # type: ignore[union-attr]
                return compacted_rows.item(self, node, of)
            if (piece := self.piece(node.args[0], node.args[1], of)) is not None:  # type: ignore[arg-type]
                return piece
            several = of(node.args[0])  # type: ignore[arg-type]
            assert isinstance(several, Several)
            return self.root(records(node)[0].shape, "item", several.number, node.args[1])
        if target in spmd.INTEGERS.values():
            return self._integer(node, of)
        if (number := _filled_number(node)) is not None:
            return self.fill(number, _dtype_of_fill(node), moves.shape_of(node))
        if target in SAME:
            return of(node.args[0])  # type: ignore[arg-type]
        first = of(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        try:
            if target in compacted_rows.FORMS and not isinstance(first, JoinedValues):
                return compacted_rows.form(self, node, of)
            if isinstance(first, Tiles) and (move := moves.MOVES.get(target)) is not None:
                return move(self, first, node, of)
            if isinstance(first, JoinedValues) or target is aten.cat.default:
                return joined_values.call(self, first, node, of)
        except Unfit:
            pass
        return self.opaque(node, of)

    def piece(self, source: Node, index: int, of: Callable[[Node], Held]) -> Tiles | None:
        """A result of a call that cuts a value into pieces; None of other calls."""
        if source.target not in moves.SPLITS or not isinstance(x := of(source.args[0]), Tiles):  # type: ignore[arg-type]
            return None
        try:
            return moves.item_of_split(self, x, source, index)
        except Unfit:
            return None

    def opaque(self, node: Node, of: Callable[[Node], Held]) -> Held:
        """A call as a term."""
        if (repeated := self._repeat_result(node, of)) is not None:
            return repeated
        at = _place_without_effect(node)
        args = node.args if at is None else (*node.args[:at], *node.args[at + 1 :])
        key = WITHOUT_WRITING.get(node.target, node.target), arguments(args, of), arguments(node.kwargs, of)
        if isinstance(node.meta[KEY], tuple):
            return Several(self.terms.number("call", *key))
        shape = records(node.args[0])[0].shape if node.target in WITHOUT_WRITING else records(node)[0].shape  # type: ignore[arg-type]
        return self.root(shape, "call", *key)

    def _repeat_result(self, node: Node, of: Callable[[Node], Held]) -> Tiles | None:
        """A pointwise call on one value that is repeated: the repetition of what it gives for the operand once. None for other calls."""
        given = {of(one) for one in node.all_input_nodes}
        x = given.pop() if len(given) == 1 else None
        if not isinstance(x, Tiles) or 0 in x.shape or not is_pointwise(node):
            return None
        if not any(stride == 0 for dim in x.dims for stride, _ in dim):
            return None
        uneven = tuple(filter(counts_elements, x.uneven))
        dims = tuple(fuse_digits(digit for digit in dim if digit[0]) for dim in x.dims)
        once = replace(x, dims=dims, uneven=tuple(row for row in x.uneven if row not in uneven))
        made = self.root(once.shape, "call", node.target, arguments(node.args, lambda _: once), arguments(node.kwargs, lambda _: once))
        found: list[Dim] = []
        for own, whole in zip(made.dims, x.dims, strict=True):
            rest = list(own)
            digits: list[Digit] = []
            for stride, extent in whole:
                taken, left = ([(0, extent)], rest) if not stride else map(list, major_digits(rest, extent))
                digits += taken
                rest = left
            found.append(fuse_digits(digits))
        return replace(made, dims=tuple(found), uneven=uneven)

    def root(self, shape: Sequence[int], *term: Any) -> Tiles:
        number = self.terms.number(*term)
        self.numel.setdefault(number, prod(shape))
        return Tiles(number, dims_of_shape(shape))

    def fill(self, number: float, dtype: object, shape: Sequence[int]) -> Tiles:
        """One number in a whole tensor: the number, repeated."""
        root = self.terms.number("filled", number, str(dtype))
        self.numel[root] = 1
        self.known.add(root)
        return repeat_root(root, shape)

    def filled_with(self, root: int) -> float | None:
        """The number that a root is; None for others."""
        what, *rest = self.terms.term(root)
        return rest[0] if what == "filled" else None

    def _integer(self, node: Node, of: Callable[[Node], Held]) -> Integer | int:
        def plain(argument: object) -> object:
            if isinstance(argument, Node):
                return of(argument)
            return tuple(map(plain, argument)) if isinstance(argument, list | tuple) else argument

        target: Any = node.target
        args = tuple(map(plain, node.args))
        if target is spmd.coordinate and is_of_chunks(args[0]):  # type: ignore[arg-type]
            return chunks_of(args[0])[0][0]  # type: ignore[arg-type]
        if target in (spmd.tile_start, spmd.tile_count) and all(isinstance(one, int) for one in args[2]):  # type: ignore[attr-defined]
            return target(*args)
        return Integer((target.__name__, *args))

    # ------------------------------------------------------------------------------------------------------------- collectives

    def elementwise(self, x: Tiles, *what: Any) -> Tiles:
        """A term that holds position by position, whatever the dims."""
        if 0 in x.shape:
            return x
        number = self.terms.number(*what, replace(x, dims=()))
        self.numel.setdefault(number, self.numel.get(x.root, 0))
        return Tiles(number, x.dims)

    def all_reduce(self, x: Tiles, axes: Sequence[str], how: str) -> Tiles:
        partial = dict(x.partial)
        if x.root in self.known and all(partial.get(axis) == how for axis in axes):
            rest = tuple(row for row in x.partial if row[0] not in axes)
            return replace(x, partial=rest, padding=self._kept_padding(x, how))
        return self.elementwise(x, "all_reduce", tuple(sorted(axes)), how)

    def _kept_padding(self, x: Tiles, how: str) -> tuple[tuple[str, float], ...]:
        return tuple(row for row in x.padding if REDUCTIONS[how].keeps(row[1]))

    def all_gather(self, x: Tiles, axes: Sequence[str], dim: int) -> Tiles:
        made = self._gather_tiles(x, axes, dim)
        return self._gather_roots(x, axes, dim, x.dims, "all_gather") if made is None else made

    def _gather_tiles(self, x: Tiles, axes: Sequence[str], dim: int) -> Tiles | None:
        """What ranks have of a known value, one behind the other along a dim; None where digits do not say it."""
        split, shape = dict(x.axes), x.shape
        otherwise = {axis for axis, _ in x.partial} | {axis.removesuffix(f"~{ZIGZAG}") for axis in split if axis.endswith(f"~{ZIGZAG}")}
        if x.root not in self.known or not otherwise.isdisjoint(axes):
            return None
        digits = [(split.get(axis, 0), self.sizes[axis]) for axis in axes]
        gone = {*axes, *(f"{ADDED}{stride}" for stride, _ in x.dims[dim])}
        padding = tuple(row for row in x.padding if row[0] not in gone)
        kept = tuple(row for row in x.axes if row[0] not in axes)
        made = Tiles(x.root, with_dim(x.dims, dim, [*digits, *x.dims[dim]]), kept, x.partial, padding)
        if not x.uneven:
            return made
        rest = tuple(row for row in x.uneven if row[0] not in axes)
        uneven = [*rows_of_longer(rest, shape, made.shape, dim)]
        for name, good, period, count in x.uneven:
            if name not in axes:
                continue
            stride, whole = split.get(name, 0), period * prod(self.sizes[axis] for axis in axes[axes.index(name) :])
            if stride > 0:
                uneven.append((ADDED, good, stride, stride * self.sizes[name]))
            elif not stride and ((period, count) != (prod(shape[dim:]), prod(shape)) or good > whole or good != whole and name != axes[0]):
                return None  # others, further inside, have not been gathered
            elif not stride and good != whole:
                uneven.append((REPEATED, good, prod(made.shape[dim:]), prod(made.shape)))
        return replace(made, uneven=in_order(uneven))

    def _gather_roots(self, x: Tiles, axes: Sequence[str], dim: int, dims: Dims, *what: Any) -> Tiles:
        """All ranks' own of a root that is not known, as one root: the first rank's, the second's, ..."""
        own = self.numel[x.root]
        if 0 in x.shape:
            return Tiles(x.root, with_dim(dims, dim, [(1, prod(self.sizes[axis] for axis in axes)), *dims[dim]]))
        number = self.terms.number(*what, tuple(axes), replace(x, dims=()))
        count = prod(self.sizes[axis] for axis in axes)
        self.numel.setdefault(number, own * count)
        return Tiles(number, with_dim(dims, dim, [(own, count), *dims[dim]]))

    def reduce_scatter(self, x: Tiles, axes: Sequence[str], dim: int, how: str) -> Tiles:
        if 0 in x.shape:
            return Tiles(x.root, with_dim(x.dims, dim, [(1, x.shape[dim] // prod(self.sizes[axis] for axis in axes))]))
        taken, rest = major_digits(x.dims[dim], prod(self.sizes[axis] for axis in axes))
        partial = dict(x.partial)
        if x.root in self.known and all(partial.get(axis) == how for axis in axes):
            left = tuple(row for row in x.partial if row[0] not in axes)
            reduced = replace(x, partial=left, padding=self._kept_padding(x, how))
            return self._place_tiles(reduced, dim, taken, rest, axes)
        return self.elementwise(replace(x, dims=with_dim(x.dims, dim, rest)), "reduce_scatter", tuple(axes), how, taken)

    def _place_tiles(self, x: Tiles, dim: int, taken: Dim, rest: Dim, axes: Sequence[str]) -> Tiles:
        """Each rank has its own tile of a dim."""
        split, shape = dict(x.axes), x.shape
        if any(axis in split for axis in axes) or any(row[0] in axes for row in x.uneven):
            raise Unfit(f"split over {axes} twice")
        digits = digits_of_axes(taken, axes, self.sizes)
        split.update({axis: stride for axis, (stride, _) in digits if stride})
        zero = [(axis, 0.0) for axis in axes] if any(row[0].startswith(ADDED) for row in x.padding) else []
        padding = [row for row in x.padding if not row[0].startswith(ADDED)]
        dims = with_dim(x.dims, dim, rest)
        made = Tiles(x.root, dims, tuple(sorted(split.items())), x.partial, tuple(sorted([*padding, *zero])))
        if END in (stride for stride, _ in taken):
            return replace(made, uneven=in_order([*x.uneven, *(row_of_axis(axis, 1) for axis in axes)]))
        if not x.uneven:
            return made
        found: dict[str, Row] = {}
        for axis, (stride, count) in digits:
            for row in x.uneven:
                if any(one[0] * one[1] == stride * count and is_of_digit(row, one, x.dims) for one in x.dims[dim]):
                    found[axis] = row
        gone = [*found.values(), added_to(x.uneven, x.dims, shape, dim)]
        kept = tuple(row for row in x.uneven if row not in gone)
        uneven = [*rows_of_longer(kept, shape, made.shape, dim)]
        uneven += [row_of_axis(axis, row[1]) for axis, row in found.items()]
        if not found:
            uneven += self._rows_of_repeated(x, made.shape, dim, axes)
        return replace(made, uneven=in_order(uneven))

    def _rows_of_repeated(self, x: Tiles, shape: Sequence[int], dim: int, axes: Sequence[str]) -> Iterator[Row]:
        """The rows of axes by which a dim of equal positions is cut, if zeros were added to it or it is a tile with padding."""
        added = added_to(x.uneven, x.dims, x.shape, dim)
        if 0 in x.shape:
            return
        is_uneven = added is not None or any(at == dim for row in x.uneven for at, _ in dims_of(row, x.shape))
        size, each, behind = x.shape[dim], x.shape[dim], prod(x.shape[dim + 1 :])
        if added is not None:
            size = added[1] // behind
            if added[1] % behind or -(-size // self.sizes[axes[0]]) * self.sizes[axes[0]] != each:
                raise Unfit("more zeros than its tiles have")
        for axis in axes if is_uneven else ():
            yield row_of_dim(axis, size, shape, dim)
            each //= self.sizes[axis]
            size = each

    def all_to_all(self, x: Tiles, axes: Sequence[str], split_dim: int, concat_dim: int) -> Tiles:
        taken, rest = major_digits(x.dims[split_dim], prod(self.sizes[axis] for axis in axes))
        gathered = self._gather_tiles(x, axes, concat_dim) if split_dim != concat_dim else None
        if gathered is None:
            return self._gather_roots(x, axes, concat_dim, with_dim(x.dims, split_dim, rest), "all_to_all", taken)
        return self._place_tiles(gathered, split_dim, taken, rest, axes)

    def to_zigzag(self, x: Tiles, axes: Sequence[str], dim: int, home: bool = False) -> Tiles:
        """The halves of tiles in zigzag order: an order of the axis's tiles, by name. With `home`, the other way round."""
        (axis,) = axes
        one, other = (axis, f"{axis}~{ZIGZAG}")[:: -1 if home else 1]
        split, own = dict(x.axes), x.dims[dim]
        if x.root in self.known and one in split and len(own) == 1 and split[one] == own[0][0] * own[0][1]:
            split[other] = split.pop(one)
            padding = ((other if name == one else name, value) for name, value in x.padding)
            uneven = in_order((other if row[0] == one else row[0], *row[1:]) for row in x.uneven)
            return replace(x, axes=tuple(sorted(split.items())), padding=tuple(sorted(padding)), uneven=uneven)
        what, *rest = self.terms.term(x.root)
        if what == ("to_zigzag" if home else "from_zigzag") and rest[:2] == [axis, own]:  # there and back again
            return replace(rest[2], dims=x.dims)
        is_repeated = any(stride == 0 for digits in x.dims for stride, _ in digits)  # then its dims tell it from the same in another shape
        number = self.terms.number("from_zigzag" if home else "to_zigzag", axis, own, x if is_repeated else replace(x, dims=()))
        self.numel.setdefault(number, self.numel.get(x.root, 0))
        return Tiles(number, x.dims)

    def from_zigzag(self, x: Tiles, axes: Sequence[str], dim: int) -> Tiles:
        return self.to_zigzag(x, axes, dim, home=True)

    def chunk(self, x: Tiles, dim: int, start: int, end: int, number: int) -> Tiles | None:
        """A chunk of a known value; None for another slice."""
        size, own = x.shape[dim], x.dims[dim]
        rows = end - start if not number else start // number
        if len(own) != 1 or rows < 1 or start != number * rows or end != min(size, start + rows):
            return None
        axis, count = name_of_chunks([number], -(-size // rows)), -(-size // rows)
        self.sizes.setdefault(axis, count)
        split = tuple(sorted([*x.axes, *([(axis, own[0][0] * rows)] if own[0][0] else [])]))
        made = replace(x, dims=with_dim(x.dims, dim, [(own[0][0], end - start)]), axes=split)
        rest = rows_of_longer(x.uneven, x.shape, made.shape, dim)
        if size == rows * count:
            return replace(made, uneven=rest)
        row = row_of_axis(axis, size * own[0][0]) if own[0][0] else row_of_dim(axis, size, made.shape, dim)
        return replace(made, uneven=in_order([*rest, row]))

    def ring_shift(self, x: Tiles, axes: Sequence[str], steps: int) -> Tiles:
        return self.elementwise(x, "ring_shift", tuple(axes), steps)

    def shard(self, x: Tiles, dim: int, tiles: int, index: Held | int) -> Tiles:
        axes = index.axes(self.sizes) if isinstance(index, Integer) else None
        extent = x.shape[dim]
        whole = lengthen_dim(x, dim, -(-extent // tiles) * tiles - extent)
        taken, rest = major_digits(whole.dims[dim], tiles)
        if x.root in self.known and axes is not None and prod(self.sizes[axis] for axis in axes) == tiles:
            if not {*axes} & {axis for axis, _ in x.partial}:
                return self._place_tiles(whole, dim, taken, rest, axes)
        return self.elementwise(replace(whole, dims=with_dim(whole.dims, dim, rest)), "shard", taken, index)

    def keep_first(self, x: Tiles, index: Held | int) -> Tiles:
        axes = index.axes(self.sizes) if isinstance(index, Integer) else None
        if x.root in self.known and axes is not None and not {*axes} & ({axis for axis, _ in x.axes} | {axis for axis, _ in x.partial}):
            if all(value == 0.0 for _, value in x.padding):
                return replace(x, partial=tuple(sorted([*x.partial, *((axis, "sum") for axis in axes)])))
            return replace(x, partial=tuple(sorted([*x.partial, *((axis, "sum") for axis in axes)])), padding=())
        return self.elementwise(x, "keep_first", index)

    def mask(self, x: Tiles, dim: int, count: Held | int, value: float) -> Tiles:
        if x.root in self.known and (rows := self._masked_rows(x, dim, count)) is not None:
            padding = {**dict(x.padding), **{row[0]: float(value) for row in rows}}
            return replace(x, padding=tuple(sorted(padding.items())), uneven=in_order({*x.uneven, *rows}))
        return self.elementwise(x, "mask", x.dims[dim], count, value)

    def _masked_rows(self, x: Tiles, dim: int, count: Held | int) -> list[Row] | None:
        """Of the axes whose uneven tiles a mask looks at the rows of `uneven`: axes that split the positions of the dim, or would if these
        were not one. None for another mask."""
        if not isinstance(count, Integer) or count.made[0] != "tile_count" or len(x.dims[dim]) > 1:
            return None
        _, size, counts, coordinates = count.made
        split, own = dict(x.axes), x.dims[dim]
        chunk = {chunks_of(axis)[0][0]: (axis,) for axis in (*split, *(row[0] for row in x.uneven)) if is_of_chunks(axis)}
        rows = [one.axes(self.sizes) if isinstance(one, Integer) else chunk.get(one) for one in coordinates]
        if any(row is None or len(row) != 1 for row in rows):
            return None
        axes = tuple(axis for row in rows if row for axis in row)
        extents = tile_sizes(size, counts)
        fits = all(is_of_chunks(axis) or self.sizes[axis] == count for axis, count in zip(axes, counts, strict=True))
        if not fits or x.shape[dim] != extents[-1]:
            return None
        pairs = zip(axes, extents, extents[1:], strict=False)
        uneven = [(axis, before) for axis, before, after in pairs if before != after * self.sizes[axis]]
        every = [*zip(axes, extents, strict=False)] if uneven else []
        if own == fuse_digits([(0, extents[-1])]) and not any(axis in split for axis in axes):
            found = [row_of_dim(axis, before, x.shape, dim) for axis, before in every]
            return found if all(row in found for row in x.uneven if row[0] in axes) else None
        if any(axis not in split for axis in axes):
            return None
        apart = [split[axis] // extent for axis, extent in zip(axes, extents[1:], strict=True) if split[axis] != END]
        unit = own[0][0] if own else apart[-1] if apart else END
        found = [row_of_axis(axis, 1 if split[axis] == END else unit * before) for axis, before in uneven]
        if [row for row in x.uneven if row[0] in axes] != [*in_order(found)]:
            return None
        return found if all(split[axis] in (unit * extent, END) for axis, extent in zip(axes, extents[1:], strict=True)) else None
