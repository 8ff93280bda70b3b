"""Sharding rules of argmax, sort, topk and quantiles: a split argmax reduces over ranks, the others need the dim whole.

A split argmax computes each rank's largest entry, reduces these over ranks, and takes the first position of the result. Sorts need the dim
whole.
"""

from __future__ import annotations

from math import inf, prod

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Operator, declarations
from meshc.rules.reduction import completed_rule, reduction_rule
from meshc.rules.rule import Local, Made, Rule, dim_of, letters_of, result_shapes, shape_of

aten = torch.ops.aten
NOWHERE = 2**62


def _lower_extreme_place(local: Local, letters: list[str], axes: list[str]) -> Made:
    """argmax, argmin -> index; max.dim, min.dim -> (value, index)."""
    (x,) = local.operands
    target = local.node.target
    largest = target in (aten.argmax.default, aten.max.dim)
    wanted = local.dtype(x)
    for letter in letters:
        x = local.neutralise(x, letter, -inf if largest else inf)
    if wanted == torch.bool:
        x = local.emit(aten._to_copy.default, x, dtype=torch.uint8)
    places = _places(local, letters)
    dim = int(letters[0][1:])
    if named_arguments(local.node)["dim"] is None:
        dim, x = 0, local.emit(aten.reshape.default, x, [-1])
    index = local.emit((aten.argmax if largest else aten.argmin).default, x, dim, True)
    value = local.emit(aten.gather.default, x, dim, index)
    place = local.emit(aten.index_select.default, places, 0, local.emit(aten.reshape.default, index, [-1]))
    place = local.emit(aten.reshape.default, place, list(local.shape(index)))
    peak = local.all_reduce(value, axes, "max" if largest else "min")
    best = local.emit(aten.eq.Tensor, value, peak)
    if local.dtype(value).is_floating_point:  # NaN counts as the largest and as the smallest, and equals nothing
        best = local.emit(aten.logical_or.default, best, local.emit(aten.isnan.default, value))
    first = local.all_reduce(local.emit(aten.where.ScalarOther, best, place, NOWHERE), axes, "min")
    if wanted == torch.bool:
        peak = local.emit(aten._to_copy.default, peak, dtype=torch.bool)
    made = [first] if target in (aten.argmax.default, aten.argmin.default) else [peak, first]
    made = [local.emit(aten.reshape.default, item, list(local.out_shape(i))) for i, item in enumerate(made)]
    return made if len(made) > 1 else made[0]


def _places(local: Local, letters: list[str]) -> Node:
    """The global index, row-major over these letters, of each entry of the tile, as one row."""
    found: Node | None = None
    for position, letter in enumerate(letters):
        unit = prod(local.global_size(other) for other in letters[position + 1 :])
        row = local.positions(letter)
        row = row if unit == 1 else local.emit(aten.mul.Tensor, row, unit)
        if found is not None:
            row = local.emit(aten.add.Tensor, local.emit(aten.unsqueeze.default, found, -1), row)
        found = row if found is None else local.emit(aten.reshape.default, row, [-1])
    assert found is not None
    return found


def _sort(node: Node, tensors: list[Node]) -> Rule:
    """sort, topk: the sorted dim is whole, and may be shorter in the result."""
    letters, shapes = letters_of(tensors[0]), result_shapes(node)
    if not letters:
        return Rule((letters,), (letters,) * len(shapes))
    dim = dim_of(node, letters)
    cut = (*letters[:dim], "o", *letters[dim + 1 :])
    results = tuple(letters if shape[dim] == shape_of(tensors[0])[dim] else cut for shape in shapes)
    return Rule((letters,), results, whole={letters[dim], "o"})


OPERATORS = declarations({
    "argmax argmin max.dim min.dim": Operator(completed_rule(_lower_extreme_place), place_along=True),
    "sort sort.stable topk": Operator(_sort, place_along=True),
    "argsort": Operator(place_along=True),
    "median nanmedian median.dim nanmedian.dim mode kthvalue": Operator(reduction_rule(None)),  # entries of rows, which are whole
})
