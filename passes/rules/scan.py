"""Scans: each rank scans its tile, and adds what the tiles before it come to.

Tiles of a scanned dim must follow each other, so only its first factor may be split. Where the scan keeps an index (cummax) it is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir.functions import Target
from meshc.passes.rules.reduction import argument
from meshc.passes.rules.rule import Rule, RuleFunction, dtype_of, integer, shape_of

if TYPE_CHECKING:
    from meshc.passes.rules.local import Local

aten = torch.ops.aten
Fold = Callable[["Local", Node], Node]
"""All of dim 0 in one."""


def _scan(neutral: float, fold: Fold, join: Target) -> RuleFunction:
    """`fold` reduces the totals of the tiles before this one (`neutral` in the place of the others), `join` puts it to each entry."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        shape = shape_of(tensors[0])
        letters = tuple(f"d{i}" for i in range(len(shape)))
        if not shape:
            return Rule((letters,), (letters,), ({},))
        letter = letters[integer(argument(node, 1, "dim", 0)) % len(shape)]
        return Rule((letters,), (letters,), ({},), lower=lambda local: _lower(local, letter), self_masked=True, major=frozenset({letter}))

    def _lower(local: Local, letter: str) -> Node:
        (x,) = local.operands
        axes, dim = local.axes(letter), int(letter[1:])
        if not axes:
            return local.call(x)
        mine = local.call(local.neutralise(x, letter, neutral))
        last = local.emit(aten.slice.Tensor, mine, dim, local.shape(mine)[dim] - 1, local.shape(mine)[dim])
        totals = local.all_gather(local.emit(aten.unsqueeze.default, last, 0), axes, 0)
        count = local.shape(totals)[0]
        places = local.emit(aten.arange.default, count, dtype=torch.int64, device=torch.device("cpu"))
        before = local.emit(aten.lt.Scalar, places, local.index(axes))
        before = local.emit(aten.reshape.default, before, [count] + [1] * (len(local.shape(totals)) - 1))
        # a number stays a number: in the place of a tensor it would change the totals' dtype
        value = neutral if local.dtype(totals).is_floating_point or local.dtype(totals).is_complex else int(neutral)
        return local.emit(join, mine, fold(local, local.emit(aten.where.ScalarOther, before, totals, value)))

    return rule


def _sum(local: Local, totals: Node) -> Node:
    return local.emit(aten.sum.dim_IntList, totals, [0])


def _prod(local: Local, totals: Node) -> Node:
    return local.emit(aten.prod.dim_int, totals, 0)


def _logsumexp(local: Local, totals: Node) -> Node:
    return local.emit(aten.logsumexp.default, totals, [0])


def _whole(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    whole = {letters[integer(argument(node, 1, "dim", 0)) % len(shape)]} if shape else set()
    return Rule((letters,), (letters, letters), ({}, {}), whole=frozenset(whole))


def _logcumsumexp(node: Node, tensors: list[Node]) -> Rule | None:
    """Complex numbers have no logaddexp that follows the branch of a running sum."""
    return None if dtype_of(tensors[0]).is_complex else _scan(-inf, _logsumexp, aten.logaddexp.default)(node, tensors)


RULES: dict[object, RuleFunction] = {
    aten.cumsum.default: _scan(0.0, _sum, aten.add.Tensor),
    aten.cumprod.default: _scan(1.0, _prod, aten.mul.Tensor),
    aten.logcumsumexp.default: _logcumsumexp,
    aten.cummax.default: _whole,
    aten.cummin.default: _whole,
}
