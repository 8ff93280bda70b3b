"""Sharding rules of reads by an index (embedding, take, gather): indices outside a rank's tile give zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops import take as _take_operators  # noqa: F401 - registers them
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Bounds, IndexBound, Operator, declarations
from meshc.rules.preconditions import holds, operand, within
from meshc.rules.rule import ALONE, Local, Rule, dim_of, dtype_of, einsum, integer, letters_of, shape_of, where_split, whole_rule

aten = torch.ops.aten
Mask = Callable[[Local, Node], Node]
"""Makes the mask of indices inside the rank's tile broadcast to what they read."""


def _read(
    node: Node, tensors: list[Node], x: Sequence[str], index: Sequence[str], made: Sequence[str], mask: Mask, **fields: Any
) -> Rule:  # fmt: skip
    """The rule of a read of `v` by an index, whose padding must be a valid index, zero. Of truths there is no sum."""
    text = f"{' '.join(x)}, {' '.join(index)} -> {' '.join(made)} +v"
    if dtype_of(tensors[0]) == torch.bool:
        text = text.replace(" +v", "").replace("v", "v!")

    def lower(local: Local) -> Node:
        x, index = local.operands
        safe, inside = inside_tile(local, index, "v")
        read = local.call(x, safe)
        return local.emit(aten.where.ScalarOther, mask(local, inside), read, 0.0 if node.target is aten.embedding.default else 0)

    return einsum(text, node, tensors, lower=where_split("v", lower), self_masked=True, clean=(1,), major={"v"}, **fields)


def _embedding(node: Node, tensors: list[Node]) -> Rule:
    index = letters_of(tensors[1], "i")
    roles = {"d": "hidden", **({"v": "vocabulary"} if _is_given(tensors[1]) else {})}
    return _read(node, tensors, "vd", index, (*index, "d"), _mask_of_rows, roles=roles)


def _index_letters(index: Node) -> str:
    return " ".join(letters_of(index, "i"))


def _is_given(index: Node) -> bool:
    """Whether an index is an input, maybe reshaped or sliced, and not positions that the model computes."""
    while index.op == "call_function" and len(index.all_input_nodes) == 1:
        index = index.all_input_nodes[0]
    return index.op == "placeholder"


def shifted_index(local: Local, index: Node, letter: str) -> tuple[Node, Node]:
    """(index less the start of the rank's tile; mask of the indices inside the tile)."""
    shifted = local.emit(aten.sub.Tensor, index, local.start(letter))
    low = local.emit(aten.ge.Scalar, shifted, 0)
    high = local.emit(aten.lt.Scalar, shifted, local.count(letter))
    return shifted, local.emit(aten.logical_and.default, low, high)


def inside_tile(local: Local, index: Node, letter: str) -> tuple[Node, Node]:
    """(local index, 0 outside the rank's tile; mask of the indices inside the tile)."""
    shifted, inside = shifted_index(local, index, letter)
    return local.emit(aten.mul.Tensor, shifted, inside), inside


def _mask_of_rows(local: Local, inside: Node) -> Node:
    return local.emit(aten.unsqueeze.default, inside, -1)


def _embedding_backward(node: Node, tensors: list[Node]) -> Rule:
    letters = letters_of(tensors[1], "i")
    index, reduced = " ".join(letters), " ".join(f"+{letter}" for letter in letters)
    row = f"{index} d, {index} -> v d {reduced}"
    lower = where_split("v", _lower_embedding_backward)
    return einsum(row, node, tensors, lower=lower, clean=(1,), major={"v"}, linear=ALONE, defers=True)


def _lower_embedding_backward(local: Local) -> Node:
    grad, index = local.operands
    padding = named_arguments(local.node)["padding_idx"]
    if padding >= 0:
        keep = local.emit(aten.ne.Scalar, index, padding)
        grad = local.emit(aten.where.ScalarOther, _mask_of_rows(local, keep), grad, 0.0)
    safe, inside = inside_tile(local, index, "v")
    grad = local.emit(aten.where.ScalarOther, _mask_of_rows(local, inside), grad, 0.0)
    return local.call(grad, safe, num_weights=local.local_size("v"), padding_idx=-1)


def _take(node: Node, tensors: list[Node]) -> Rule:
    rows = _index_letters(tensors[1])
    text = f"{rows} v, {rows} -> {rows} +v"
    return einsum(text, node, tensors, lower=_lower_take, self_masked=True, major={"v"}, roles={"v": "vocabulary"})


def _lower_take(local: Local) -> Node:
    x, index = local.operands
    if len(local.axes("v")) > 1:  # tiles of tiles: an index after this tile is another rank's, though padding has room for it
        before = local.emit(aten.lt.Scalar, local.emit(aten.sub.Tensor, index, local.start("v")), local.count("v"))
        index = local.emit(aten.where.ScalarOther, before, index, named_arguments(local.node)["ignore"])
    return local.call(x, index, start=local.start("v"))


def _columns(node: Node, tensors: list[Node]) -> Rule:
    """take_backward, one_hot: each row has one entry that is not zero, at its index."""
    rows = _index_letters(tensors[0])
    return einsum(f"{', '.join([rows] * len(tensors))} -> {rows} v", node, tensors, lower=_lower_columns, major={"v"})


def _lower_columns(local: Local) -> Node:
    return local.call(*local.operands, columns=local.local_size("v"), start=local.start("v"))


def gather_letters(node: Node, x: Node, index: Node) -> tuple[int, list[str], list[str]]:
    """(dim, letters of x, letters of index): other dims may be split where both have one size; where the index is shorter, not."""
    shape, short = shape_of(x), shape_of(index)
    dim = dim_of(node, shape)
    left = [f"a{d}" if a == b else f"x{d}!" for d, (a, b) in enumerate(zip(shape, short, strict=True))]
    right = [letter.replace("x", "j") for letter in left]
    left[dim], right[dim] = "v", "j"
    return dim, left, right


def _gather(node: Node, tensors: list[Node]) -> Rule | None:
    """Like `take`, with any number of entries for each row."""
    if not shape_of(tensors[0]) or not shape_of(tensors[1]):
        return whole_rule(node, tensors)
    _, left, right = gather_letters(node, *tensors)
    return _read(node, tensors, left, right, right, lambda local, inside: inside)


def _index_select(node: Node, tensors: list[Node]) -> Rule | None:
    letters = letters_of(tensors[0], "a")
    if not letters or shape_of(tensors[1]) == ():
        return whole_rule(node, tensors)
    dim = dim_of(node, letters)
    left, right = ([*letters[:dim], letter, *letters[dim + 1 :]] for letter in "vj")
    mask = [-1 if place == dim else 1 for place in range(len(letters))]
    return _read(node, tensors, left, ["j"], right, lambda local, inside: local.emit(aten.reshape.default, inside, mask))


def index_tensors(node: Node) -> list[Node | None]:
    """The index tensors of x[i, None, j], by dim; None where a dim is not indexed."""
    return list(named_arguments(node)["indices"])


def advanced_index_letters(node: Node, tensors: list[Node]) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Letters of x, of each index tensor, and of x[indices], where the indices' dims replace the indexed dims; None for masks."""
    indices = index_tensors(node)
    if any(index is not None and dtype_of(index) in (torch.bool, torch.uint8) for index in indices):
        return None
    shape = shape_of(tensors[0])
    at = [position for position, index in enumerate(indices) if index is not None]
    extents = [shape_of(index) for index in indices if index is not None]
    rank = max(map(len, extents))
    x = [f"v{d}!" if d in at else f"a{d}" for d in range(len(shape))]
    letters = [[f"i{rank - len(shape) + d}" for d in range(len(shape))] for shape in extents]
    together = at == list(range(at[0], at[-1] + 1))
    rest = [letter for letter in x if not letter.endswith("!")]
    place = at[0] if together else 0
    return x, letters, [*rest[:place], *(f"i{d}" for d in range(rank)), *rest[place:]]


def _index(node: Node, tensors: list[Node]) -> Rule | None:
    found = advanced_index_letters(node, tensors)
    if found is None:
        return None
    x, letters, out = found
    operands = [" ".join(row) for row in (x, *letters)]
    return einsum(f"{', '.join(operands)} -> {' '.join(out)}", node, tensors, clean=tuple(range(1, len(tensors))))


def _take_flat(node: Node, tensors: list[Node]) -> Rule:
    """aten.take: entries of x by their flat position."""
    x = " ".join(f"{letter}!" for letter in letters_of(tensors[0], "x"))
    index = _index_letters(tensors[1])
    return einsum(f"{x}, {index} -> {index}", node, tensors, clean=(1,))


def _index_bound(size: Callable[[Node, tuple[int, ...]], int], operand: int = 1, ends: bool = False) -> Bounds:
    """Bounds of one index: from 0 to a size, by the call and the shape of its first operand; with `ends`, also from the end."""

    def bounds(node: Node, tensors: list[Node]) -> list[IndexBound]:
        high = integer(size(node, shape_of(tensors[0])))
        return [IndexBound(operand, -high if ends else 0, high, named_arguments(node).get("ignore"))]

    return bounds


def _along(node: Node, shape: tuple[int, ...]) -> int:
    return (shape or (1,))[named_arguments(node)["dim"]]


rows_bound = _index_bound(lambda node, shape: shape[0])
bound_along = _index_bound(_along)
bound_from_both_ends = _index_bound(_along, ends=True)


def advanced_index_bounds(node: Node, tensors: list[Node]) -> list[IndexBound]:
    """x[i, None, j]: masks among them have no bounds."""
    indices = index_tensors(node)
    sizes = [size for size, index in zip(shape_of(tensors[0]), indices, strict=False) if index is not None]
    if any(dtype_of(index) in (torch.bool, torch.uint8) for index in indices if index is not None):
        return []
    return [IndexBound(1 + position, -size, size) for position, size in enumerate(sizes)]


OPERATORS = declarations({
    "meshc.check_index": Operator(),
    "embedding": Operator(_embedding, linear=ALONE, monotone=rises_in_first, any_order=True, bounds=rows_bound, gathers=True),
    "embedding_dense_backward": Operator(
        _embedding_backward,
        any_order=True,
        preconditions=(
            holds("grad_output has the shape of indices and one dim more", lambda o: o["grad_output"].shape[:-1] == o["indices"].shape),
            lambda o: within("indices", 0, operand("num_weights"))(o) if o["scale_grad_by_freq"] else None,
        ),
    ),
    "meshc.take": Operator(
        _take, any_order=True, bounds=_index_bound(lambda node, shape: shape[-1]), ignores_outside=True, cheap=True, gathers=True
    ),
    "meshc.take_backward": Operator(_columns, any_order=True),
    "meshc.one_hot": Operator(
        _columns, any_order=True, bounds=_index_bound(lambda node, shape: named_arguments(node)["columns"], 0), ignores_outside=True
    ),
    "take": Operator(_take_flat, linear=ALONE, monotone=rises_in_first, bounds=_index_bound(lambda node, shape: prod(shape), ends=True)),
    "gather": Operator(_gather, linear=ALONE, monotone=rises_in_first, bounds=bound_along, gathers=True),
    "index_select": Operator(_index_select, linear=ALONE, monotone=rises_in_first, bounds=bound_along, gathers=True),
    "index.Tensor": Operator(_index, linear=ALONE, monotone=rises_in_first, bounds=advanced_index_bounds, gathers=True),
    "_unsafe_index.Tensor": Operator(_index, linear=ALONE, monotone=rises_in_first),
})
