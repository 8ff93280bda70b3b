"""Sharding rules of reads by an index (embedding, take, gather): indices outside a rank's tile give zero."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops import take as _take_operators  # noqa: F401 - registers them
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import IndexBound, Operator, declarations
from meshc.rules.preconditions import holds, operand, within
from meshc.rules.rule import ALONE, Rule, dtype_of, einsum, integer, shape_of, whole_rule

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten
meshc = torch.ops.meshc


READS: dict[str, object] = {"self_masked": True, "clean": (1,), "major": frozenset("v")}
"""Fields of rules that read rows `v` by an index, the second operand; its padding must be a valid index, zero."""


def _index_letters(node: Node) -> list[str]:
    return [f"i{k}" for k in range(len(shape_of(node)))]


def _embedding(node: Node, tensors: list[Node]) -> Rule:
    index = " ".join(_index_letters(tensors[1]))
    roles = {"d": "hidden", **({"v": "vocabulary"} if _is_given(tensors[1]) else {})}
    return einsum(f"v d, {index} -> {index} d +v", node, tensors, lower=_lower_embedding, roles=roles, **READS)


def _is_given(index: Node) -> bool:
    """Whether an index is an input, maybe reshaped or sliced, and not positions that the model computes."""
    while index.op == "call_function" and len(index.all_input_nodes) == 1:
        index = index.all_input_nodes[0]
    return index.op == "placeholder"


def inside_tile(local: Local, index: Node, letter: str) -> tuple[Node, Node]:
    """(local index, 0 outside the rank's tile; mask of the indices inside the tile)."""
    shifted = local.emit(aten.sub.Tensor, index, local.start(letter))
    low = local.emit(aten.ge.Scalar, shifted, 0)
    high = local.emit(aten.lt.Scalar, shifted, local.count(letter))
    inside = local.emit(aten.logical_and.default, low, high)
    return local.emit(aten.mul.Tensor, shifted, inside), inside


def _lower_embedding(local: Local) -> Node:
    weight, index = local.operands
    if not local.axes("v"):
        return local.emit(aten.embedding.default, weight, index)
    safe, inside = inside_tile(local, index, "v")
    rows = local.emit(aten.embedding.default, weight, safe)
    return local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, inside, -1), rows, 0.0)


def _embedding_backward(node: Node, tensors: list[Node]) -> Rule:
    letters = _index_letters(tensors[1])
    index = " ".join(letters)
    reduced = " ".join(f"+{letter}" for letter in letters)
    row = f"{index} d, {index} -> v d {reduced}"
    return einsum(row, node, tensors, lower=_lower_embedding_backward, clean=(1,), major=frozenset("v"), linear=ALONE, defers=True)


def _lower_embedding_backward(local: Local) -> Node:
    grad, index = local.operands
    rows, padding, scale = local.node.args[2], integer(local.node.args[3]), local.node.args[4]
    if not local.axes("v"):
        return local.emit(aten.embedding_dense_backward.default, grad, index, rows, padding, scale)
    if padding >= 0:
        keep = local.emit(aten.ne.Scalar, index, padding)
        grad = local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, keep, -1), grad, 0.0)
    safe, inside = inside_tile(local, index, "v")
    grad = local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, inside, -1), grad, 0.0)
    return local.emit(aten.embedding_dense_backward.default, grad, safe, local.local_size("v"), -1, scale)


def _take(node: Node, tensors: list[Node]) -> Rule:
    rows = " ".join(_index_letters(tensors[1]))
    text = f"{rows} v, {rows} -> {rows} +v"
    return einsum(text, node, tensors, lower=_lower_take, self_masked=True, major=frozenset("v"), roles={"v": "vocabulary"})


def _lower_take(local: Local) -> Node:
    x, index = local.operands
    ignore = local.node.args[2]
    if len(local.axes("v")) > 1:  # tiles of tiles: an index after this tile is another rank's, though padding has room for it
        before = local.emit(aten.lt.Scalar, local.emit(aten.sub.Tensor, index, local.start("v")), local.count("v"))
        index = local.emit(aten.where.ScalarOther, before, index, ignore)
    return local.emit(meshc.take.default, x, index, ignore, local.start("v"))


def _take_backward(node: Node, tensors: list[Node]) -> Rule:
    rows = " ".join(_index_letters(tensors[1]))
    return einsum(f"{rows}, {rows} -> {rows} v", node, tensors, lower=_lower_take_backward, major=frozenset("v"))


def _lower_take_backward(local: Local) -> Node:
    grad, index = local.operands
    return local.emit(meshc.take_backward.default, grad, index, local.node.args[2], local.local_size("v"), local.start("v"))


def _one_hot(node: Node, tensors: list[Node]) -> Rule:
    rows = " ".join(_index_letters(tensors[0]))
    return einsum(f"{rows} -> {rows} v", node, tensors, lower=_lower_one_hot, major=frozenset("v"))


def _lower_one_hot(local: Local) -> Node:
    (index,) = local.operands
    return local.emit(meshc.one_hot.default, index, local.local_size("v"), local.start("v"))


def gather_letters(node: Node, x: Node, index: Node) -> tuple[int, list[str], list[str]]:
    """(dim, letters of x, letters of index): other dims may be split where both have one size; where the index is shorter, not."""
    shape, short = shape_of(x), shape_of(index)
    dim = integer(node.args[1]) % len(shape)
    left = [f"a{d}" if a == b else f"x{d}!" for d, (a, b) in enumerate(zip(shape, short, strict=True))]
    right = [f"a{d}" if a == b else f"j{d}!" for d, (a, b) in enumerate(zip(shape, short, strict=True))]
    left[dim], right[dim] = "v", "j"
    return dim, left, right


def _gather(node: Node, tensors: list[Node]) -> Rule | None:
    """Like `take`, with any number of entries for each row."""
    if not shape_of(tensors[0]) or not shape_of(tensors[1]):
        return whole_rule(node, tensors)
    _, left, right = gather_letters(node, *tensors)
    index = " ".join(right)
    text = f"{' '.join(left)}, {index} -> {index} +v"
    if dtype_of(tensors[0]) == torch.bool:  # no sum of truths
        text = text.replace(" +v", "").replace("v", "v!")
    return einsum(text, node, tensors, lower=_lower_gather, **READS)


def _lower_gather(local: Local) -> Node:
    x, index = local.operands
    dim = local.node.args[1]
    if not local.axes("v"):
        return local.emit(aten.gather.default, x, dim, index)
    safe, inside = inside_tile(local, index, "v")
    return local.emit(aten.where.ScalarOther, inside, local.emit(aten.gather.default, x, dim, safe), 0)


def _index_select(node: Node, tensors: list[Node]) -> Rule | None:
    shape = shape_of(tensors[0])
    if not shape or shape_of(tensors[1]) == ():
        return whole_rule(node, tensors)
    dim = integer(node.args[1]) % len(shape)
    before, after = [" ".join(f"a{d}" for d in range(*ends)) for ends in ((0, dim), (dim + 1, len(shape)))]
    summed = dtype_of(tensors[0]) != torch.bool
    text = f"{before} v{'' if summed else '!'} {after}, j -> {before} j {after} {'+v' if summed else ''}"
    return einsum(text, node, tensors, lower=_lower_index_select, **READS)


def _lower_index_select(local: Local) -> Node:
    x, index = local.operands
    dim = integer(local.node.args[1])
    if not local.axes("v"):
        return local.emit(aten.index_select.default, x, dim, index)
    safe, inside = inside_tile(local, index, "v")
    rows = local.emit(aten.index_select.default, x, dim, safe)
    rank = len(local.shape(x))
    inside = local.emit(aten.reshape.default, inside, [-1 if d == dim % rank else 1 for d in range(rank)])
    return local.emit(aten.where.ScalarOther, inside, rows, 0)


def index_tensors(node: Node) -> list[Node | None]:
    """The index tensors of x[i, None, j], by dim; None where a dim is not indexed."""
    given = node.args[1]
    assert isinstance(given, list | tuple)
    return [index if isinstance(index, Node) else None for index in given]


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
    x = " ".join(f"x{d}!" for d in range(len(shape_of(tensors[0]))))
    index = " ".join(_index_letters(tensors[1]))
    return einsum(f"{x}, {index} -> {index}", node, tensors, clean=(1,))


def rows_bound(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(1, 0, shape_of(tensors[0])[0])]


def _columns_bound(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(1, 0, shape_of(tensors[0])[-1], integer(node.args[2]))]


def bound_along(node: Node, tensors: list[Node]) -> list[IndexBound]:
    shape = shape_of(tensors[0]) or (1,)
    return [IndexBound(1, 0, shape[integer(node.args[1]) % len(shape)])]


def bound_from_both_ends(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(bound.operand, -bound.high, bound.high) for bound in bound_along(node, tensors)]


def _classes_bound(node: Node, tensors: list[Node]) -> list[IndexBound]:
    return [IndexBound(0, 0, integer(node.args[1]))]


def _flat_bound(node: Node, tensors: list[Node]) -> list[IndexBound]:
    size = prod(shape_of(tensors[0]))
    return [IndexBound(1, -size, size)]


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
    "meshc.take": Operator(_take, any_order=True, bounds=_columns_bound, ignores_outside=True, cheap=True, gathers=True),
    "meshc.take_backward": Operator(_take_backward, any_order=True),
    "meshc.one_hot": Operator(_one_hot, any_order=True, bounds=_classes_bound, ignores_outside=True),
    "take": Operator(_take_flat, linear=ALONE, monotone=rises_in_first, bounds=_flat_bound),
    "gather": Operator(_gather, linear=ALONE, monotone=rises_in_first, bounds=bound_along, gathers=True),
    "index_select": Operator(_index_select, linear=ALONE, monotone=rises_in_first, bounds=bound_along, gathers=True),
    "index.Tensor": Operator(_index, linear=ALONE, monotone=rises_in_first, bounds=advanced_index_bounds, gathers=True),
    "_unsafe_index.Tensor": Operator(_index, linear=ALONE, monotone=rises_in_first),
})
