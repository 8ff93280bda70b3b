"""Result of a call, by what is known of its operands: tiles moved, or else a new term.

    reshape(x, [8, 4])                 x's elements: the same root, other dims
    all_gather(x, ["dp"], 0)           x, no longer split over dp
    mm(x, w)                           a new root: a term of mm and both operands' tiles

The traced graph, the program's lines and the lines of a rule's lowering are all walked by it, so that equal lines give equal tiles. A root
is *known* if it is a value of the traced graph: then what its axes say holds of it on all ranks. Of any other root nothing is known but
the calls that made it; collectives and tiles of those are terms, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch.fx import Node

from meshc.ir import KEY, is_getitem, records, spmd
from meshc.ir.schemas import named_arguments
from meshc.ir.sizes import Ratio, Size
from meshc.ops import block_codes as _coded  # noqa: F401 - registers its operators
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops.state_rounding import IN_PLACE
from meshc.proof import compacted_rows, divided, joined_values, moves, rows_in_use, sliced_tiles
from meshc.proof.chunks import chunks_of, is_of_chunks
from meshc.proof.held import Held, Integer, JoinedValues, Several
from meshc.proof.terms import TermTable, arguments
from meshc.proof.tiles import Digit, Dim, Tiles, Unfit, dims_of_shape, fuse_digits, major_digits
from meshc.proof.uneven import counts_elements
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
            if node.args[0].target is rows_in_use.USED:  # type: ignore[union-attr]
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
        if source.target not in sliced_tiles.SPLITS or not isinstance(x := of(source.args[0]), Tiles):  # type: ignore[arg-type]
            return None
        try:
            return sliced_tiles.item_of_split(self, x, source, index)
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
