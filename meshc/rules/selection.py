"""Sharding rules of argmax, sort, topk and quantiles: a split argmax reduces over ranks, the others need the dim whole.

A split argmax computes each rank's largest entry, reduces these over ranks, and takes the first position of the result. Sorts need the dim
whole.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.operator import Operator, declarations
from meshc.rules.reduction import argument, reduce
from meshc.rules.rule import Made, Rule, RuleFunction, integer, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten
NOWHERE = 2**62


def _extreme_place(node: Node, tensors: list[Node]) -> Rule:
    """argmax, argmin -> index; max.dim, min.dim -> (value, index)."""
    found = reduce(node, tensors, argument(node, 1, "dim", None), bool(argument(node, 2, "keepdim", False)), None)
    letters = sorted(found.whole)
    return Rule(
        found.operands, found.results, found.sums, lower=lambda local: _lower_extreme_place(local, letters), self_masked=True
    )


def _lower_extreme_place(local: Local, letters: list[str]) -> Made:
    (x,) = local.operands
    axes = [axis for letter in letters for axis in local.axes(letter)]
    if not axes:
        return local.call(x)
    target = local.node.target
    largest = target in (aten.argmax.default, aten.max.dim)
    wanted = local.dtype(x)
    for letter in letters:
        x = local.neutralise(x, letter, -inf if largest else inf)
    if wanted == torch.bool:
        x = local.emit(aten._to_copy.default, x, dtype=torch.uint8)
    places = _places(local, letters)
    dim = int(letters[0][1:]) if argument(local.node, 1, "dim", None) is not None else 0
    if argument(local.node, 1, "dim", None) is None:
        x = local.emit(aten.reshape.default, x, [-1])
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
        row = local.positions(letter, torch.int64, torch.device("cpu"))
        row = row if unit == 1 else local.emit(aten.mul.Tensor, row, unit)
        if found is not None:
            row = local.emit(aten.add.Tensor, local.emit(aten.unsqueeze.default, found, -1), row)
        found = row if found is None else local.emit(aten.reshape.default, row, [-1])
    assert found is not None
    return found


def _sort_rule(dim: int, default: int) -> RuleFunction:
    """sort, topk: the sorted dim is whole, and may be shorter in the result."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        shape = shape_of(tensors[0])
        letters = tuple(f"d{i}" for i in range(len(shape)))
        if not shape:
            return Rule((letters,), (letters,) * len(result_shapes(node)), ({},) * len(result_shapes(node)))
        position = integer(argument(node, dim, "dim", default)) % len(shape)
        outs = []
        for result in result_shapes(node):
            same = result[position] == shape[position]
            outs.append(letters if same else tuple("o" if i == position else letter for i, letter in enumerate(letters)))
        return Rule((letters,), tuple(outs), ({},) * len(outs), whole=frozenset({letters[position], "o"}))

    return rule


def _quantile(dim: int, keep: int) -> RuleFunction:
    """median, kthvalue, mode: one entry of each row; the dim is whole."""
    return lambda node, tensors: reduce(
        node, tensors, argument(node, dim, "dim", -1), bool(argument(node, keep, "keepdim", False)), None
    )


def _quantile_of_all(node: Node, tensors: list[Node]) -> Rule:
    return reduce(node, tensors, None, False, None)


OPERATORS = declarations({
    "argmax argmin": Operator(_extreme_place, place_along=(1, None)),
    "max.dim min.dim": Operator(_extreme_place, place_along=(1, -1)),
    "sort": Operator(_sort_rule(1, -1), place_along=(1, -1)),
    "argsort": Operator(place_along=(1, -1)),
    "sort.stable topk": Operator(_sort_rule(2, -1), place_along=(2, -1)),
    "median nanmedian": Operator(_quantile_of_all),
    "median.dim nanmedian.dim mode": Operator(_quantile(1, 2)),
    "kthvalue": Operator(_quantile(2, 3)),
})
