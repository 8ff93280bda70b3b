"""Sharding rules of writes by an index (scatter, index_add, index_put): each rank writes the entries that fall into its tile.

The written values must be whole, since the last of two entries for one position wins. If entries add up, they may be split, and x is kept
on one rank so that it counts once. Entries outside a tile go to an extra row, which is then cut off.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.index import (
    advanced_index_bounds,
    advanced_index_letters,
    bound_along,
    bound_from_both_ends,
    gather_letters,
    index_tensors,
    shifted_index,
)
from meshc.rules.monotone import rises_in_first
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import (
    ALONE,
    ONE,
    Local,
    Rule,
    all_operands,
    count_once,
    dim_of,
    dims_of,
    dtype_of,
    einsum,
    letters_of,
    shape_of,
    whole_rule,
)

aten = torch.ops.aten
ADDS = {aten.scatter_add.default, aten.index_add.default}


def _scatter(node: Node, tensors: list[Node]) -> Rule | None:
    """scatter, scatter_add, scatter_reduce: an index for each entry. Dims in which x, index and source differ must be whole."""
    x, index, *sources = tensors
    if not shape_of(x) or not shape_of(index):
        return whole_rule(node, tensors)
    if any(shape_of(t) and len(shape_of(t)) != len(shape_of(x)) for t in sources):
        return None
    dim, left, right = gather_letters(node, x, index)
    written = []
    for source in sources:
        row = []
        for d, (have, used) in enumerate(zip(shape_of(source), shape_of(index), strict=False)):
            if have != used:
                right[d] = f"j{d}!"
                left[d] = "v" if d == dim else f"x{d}!"
            row.append(d if have == used else -1 - d)
        written.append(row)
    right[dim] = _written_letter(node, x, right[dim].rstrip("!"), all(d >= 0 for row in written for d in row))
    rows = [" ".join(right[d].lstrip("+") if d >= 0 else f"s{-1 - d}!" for d in row) for row in written]
    return _write_rule(node, tensors, " ".join(left), " ".join(right), rows)


def _written_letter(node: Node, x: Node, letter: str, fits: bool) -> str:
    """The letter of the written entries: summed where entries add up, else whole."""
    return f"+{letter}" if node.target in ADDS and fits and dtype_of(x) != torch.bool else f"{letter}!"


def _write_rule(node: Node, tensors: list[Node], x: str, index: str, written: list[str]) -> Rule:
    sums = " ".join(letter for letter in index.split() if letter.startswith("+"))
    operands = [x, index.replace("+", ""), *(row.replace("+", "") for row in written)]
    text = f"{', '.join(operands)} -> {x} {sums}"
    return einsum(text, node, tensors, lower=_lower_writing, clean=(1,), major={"v"})


def _index_add(node: Node, tensors: list[Node]) -> Rule | None:
    """index_add, index_copy, index_fill, index_reduce: an index for each row."""
    row = letters_of(tensors[0], "a")
    if not row or shape_of(tensors[1]) == ():
        return whole_rule(node, tensors)
    if any(len(shape_of(t)) not in (0, len(row)) for t in tensors[2:]):
        return None
    dim, place = dim_of(node, row), _written_letter(node, tensors[0], "j", True)
    x, rows = [" ".join([*row[:dim], at, *row[dim + 1 :]]) for at in ("v", place)]
    return _write_rule(node, tensors, x, place, [rows if shape_of(t) else "" for t in tensors[2:]])


def _lower_writing(local: Local) -> Node:
    x, index, *written = local.operands
    x = count_once(local, x)
    if not local.axes("v"):
        return local.call(x, index, *written)
    dim = dim_of(local.node, local.shape(x))
    index, size = _tile_index(local, index), local.shape(x)[dim]
    made = local.call(_append_row(local, x, dim), index, *written)
    return local.emit(aten.slice.Tensor, made, dim, 0, size)


def _tile_index(local: Local, index: Node) -> Node:
    """Converts global indices (from the end where negative) to local ones; those outside the tile point to the row behind it."""
    negative = local.emit(aten.lt.Scalar, index, 0)
    index = local.emit(aten.where.self, negative, local.emit(aten.add.Tensor, index, local.global_size("v")), index)
    shifted, inside = shifted_index(local, index, "v")
    return local.emit(aten.where.ScalarOther, inside, shifted, local.local_size("v"))


def _append_row(local: Local, x: Node, dim: int) -> Node:
    return local.emit(aten.cat.default, [x, local.emit(aten.slice.Tensor, x, dim, 0, 1)], dim)


def _masked_put(node: Node, tensors: list[Node]) -> Rule | None:
    """x[mask] = values, for one mask over neighbouring dims, which are whole if there is a value for each True."""
    indices = index_tensors(node)
    masks = [place for place, index in enumerate(indices) if index is not None]
    if len(masks) != 1 or dtype_of(tensors[1]) != torch.bool:
        return None
    (start,), (x, mask, values) = masks, map(shape_of, tensors)
    end = start + len(mask)
    several = len(values) > len(x) - end and values[len(values) - (len(x) - end) - 1] != 1
    letters = [f"m{d}{'!' * several}" if start <= d < end else f"a{d}" for d in range(len(x))]
    written = [*letters[:start], "n!" if several else ONE, *letters[end:]]
    rows = (letters, letters[start:end], written[len(written) - len(values) :])
    return einsum(f"{', '.join(map(' '.join, rows))} -> {' '.join(letters)}", node, tensors, lower=_lower_index_put)


def _index_put(node: Node, tensors: list[Node]) -> Rule | None:
    """Rows that overwrite each other must be whole; rows that add up may be split, and x then counts once."""
    found = advanced_index_letters(node, tensors)
    if found is None:
        return _masked_put(node, tensors)
    x, letters, out = found
    values = out[len(out) - len(shape_of(tensors[-1])) :]
    text = f"{', '.join(' '.join(row) for row in (x, *letters, values))} -> {' '.join(x)}"
    for letter in sorted({letter for row in letters for letter in row}):
        # values that broadcast along a letter have no padding that could be set to zero
        written = letter in values and shape_of(tensors[-1])[values.index(letter)] != 1
        text = f"{text} +{letter}" if named_arguments(node)["accumulate"] and written else text.replace(letter, f"{letter}!")
    return einsum(text, node, tensors, lower=_lower_index_put, clean=tuple(range(1, 1 + len(letters))))


def _lower_index_put(local: Local) -> Node:
    x, *indices, values = local.operands
    return local.call(count_once(local, x), *indices, values)


def _part(node: Node, tensors: list[Node]) -> Rule:
    """select_scatter, slice_scatter: the dim of the part must be whole."""
    letters = dims_of("d", shape_of(node))
    dim = dim_of(node, letters)
    cut = [] if node.target is aten.select_scatter.default else ["p" if shape_of(tensors[1])[dim] != 1 else ONE]
    part = (*letters[:dim], *cut, *letters[dim + 1 :])
    return Rule((letters, part), (letters,), whole={letters[dim], "p"}, kind="carry", linear=all_operands(2), defers=True)


OPERATORS = declarations({
    "scatter.src": Operator(_scatter, linear=((0, 2),), joins=True, any_order=True, bounds=bound_along),
    "scatter.value": Operator(_scatter, affine=ALONE, any_order=True, bounds=bound_along),
    "scatter.reduce scatter.value_reduce": Operator(_scatter, any_order=True, bounds=bound_along),
    "scatter_add": Operator(_scatter, linear=((0, 2),), bounds=bound_along),
    "scatter_reduce.two": Operator(_scatter, bounds=bound_along),
    "index_add": Operator(_index_add, linear=((0, 2),), bounds=bound_along),
    "index_copy": Operator(_index_add, linear=((0, 2),), joins=True, bounds=bound_along),
    "index_fill.int_Scalar": Operator(
        _index_add, linear_at_zero=True, monotone=rises_in_first, affine=ALONE, bounds=bound_from_both_ends
    ),
    "index_fill.int_Tensor": Operator(_index_add, linear=((0, 2),), joins=True, bounds=bound_from_both_ends),
    "index_reduce": Operator(_index_add, bounds=bound_along),
    "index_put": Operator(_index_put, linear=((0, -1),), joins=True, bounds=advanced_index_bounds),
    "_unsafe_index_put": Operator(_index_put, linear=((0, -1),)),
    "select_scatter slice_scatter": Operator(_part, joins=True),
})
