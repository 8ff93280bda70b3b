"""Sharding rules of scans (cumsum, cummax, ...): each rank scans its tile and combines it with the totals of the tiles before.

Tiles of a scanned dim must follow each other, so only its first factor may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir.functions import Target
from meshc.ops import scan_back as _operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.reduction import argument
from meshc.rules.rule import ALONE, Made, Rule, RuleFunction, dtype_of, integer, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten, meshc = torch.ops.aten, torch.ops.meshc
Fold = Callable[["Local", Node], Node]
"""(local, totals) -> reduction of `totals` over dim 0."""


def _scan(neutral: float, fold: Fold, join: Target, back: bool = False) -> RuleFunction:
    """`fold` reduces the totals of the tiles before this one (`neutral` in place of the others); `join` combines that with each entry.
    `back`: a scan from the end, so of the tiles behind.
    """

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
        totals = _totals(local, mine, axes, dim, back)
        # an int for integer totals: a float would change their dtype
        value = neutral if local.dtype(totals).is_floating_point or local.dtype(totals).is_complex else int(neutral)
        return local.emit(join, mine, fold(local, local.emit(aten.where.ScalarOther, _before(local, totals, axes, back), totals, value)))

    return rule


def _totals(local: Local, scanned: Node, axes: Sequence[str], dim: int, back: bool = False) -> Node:
    """The total of each tile, gathered along a new first dim."""
    at = 0 if back else local.shape(scanned)[dim] - 1
    last = local.emit(aten.slice.Tensor, scanned, dim, at, at + 1)
    return local.all_gather(local.emit(aten.unsqueeze.default, last, 0), axes, 0)


def _before(local: Local, totals: Node, axes: Sequence[str], back: bool = False) -> Node:
    """Mask of the totals of tiles before this one, or with `back` behind it."""
    count = local.shape(totals)[0]
    places = local.emit(aten.arange.default, count, dtype=torch.int64, device=torch.device("cpu"))
    before = local.emit((aten.gt if back else aten.lt).Scalar, places, local.index(axes))
    return local.emit(aten.reshape.default, before, [count] + [1] * (len(local.shape(totals)) - 1))


def _sum(local: Local, totals: Node) -> Node:
    return local.emit(aten.sum.dim_IntList, totals, [0])


def _prod(local: Local, totals: Node) -> Node:
    return local.emit(aten.prod.dim_int, totals, 0)


def _logsumexp(local: Local, totals: Node) -> Node:
    return local.emit(aten.logsumexp.default, totals, [0])


def _extreme(node: Node, tensors: list[Node]) -> Rule:
    """cummax and cummin: (value, index). Of equal values the last counts, so an earlier tile's is used only if it is better."""
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    if not shape:
        return Rule((letters,), (letters, letters), ({}, {}))
    letter = letters[integer(argument(node, 1, "dim", 0)) % len(shape)]
    return Rule(
        (letters,), (letters, letters), ({}, {}), lower=lambda local: _lower_extreme(local, letter), self_masked=True,
        major=frozenset({letter}),
    )  # fmt: skip


def _lower_extreme(local: Local, letter: str) -> Made:
    (x,) = local.operands
    axes, dim = local.axes(letter), int(letter[1:])
    if not axes:
        return local.call(x)
    largest = local.node.target is aten.cummax.default
    worst = _worst(local.dtype(x), largest)
    scanned = local.call(local.neutralise(x, letter, worst))
    value, place = local.item(scanned, 0), local.emit(aten.add.Tensor, local.item(scanned, 1), local.start(letter))
    values, places = (_totals(local, one, axes, dim) for one in (value, place))
    found = local.emit(local.node.target, local.emit(aten.where.ScalarOther, _before(local, values, axes), values, worst), 0)
    count = local.shape(values)[0]
    peak, tile = (local.emit(aten.slice.Tensor, local.item(found, index), 0, count - 1, count) for index in range(2))
    its = local.emit(aten.squeeze.dims, local.emit(aten.gather.default, places, 0, tile), [0])
    peak = local.emit(aten.squeeze.dims, peak, [0])
    better = local.emit((aten.gt if largest else aten.lt).Tensor, peak, value)
    if local.dtype(x).is_floating_point:  # NaN is the largest and the smallest
        unlike = local.emit(aten.ne.Tensor, peak, peak), local.emit(aten.eq.Tensor, value, value)
        better = local.emit(aten.logical_or.default, better, local.emit(aten.logical_and.default, *unlike))
    return [local.emit(aten.where.self, better, mine, own) for mine, own in ((peak, value), (its, place))]


def _worst(dtype: torch.dtype, largest: bool) -> float:
    """The neutral value: the smallest for a maximum, the largest for a minimum."""
    if dtype.is_floating_point:
        return -inf if largest else inf
    if dtype == torch.bool:
        return not largest
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


def _logcumsumexp(node: Node, tensors: list[Node]) -> Rule | None:
    """Complex numbers have no logaddexp that follows the branch of a running sum."""
    return None if dtype_of(tensors[0]).is_complex else _scan(-inf, _logsumexp, aten.logaddexp.default)(node, tensors)


OPERATORS = declarations({
    "cumsum": Operator(_scan(0.0, _sum, aten.add.Tensor), linear=ALONE, any_order=True),
    "cumprod": Operator(_scan(1.0, _prod, aten.mul.Tensor), any_order=True),
    "logcumsumexp": Operator(_logcumsumexp, any_order=True),
    "meshc.cumsum_back": Operator(_scan(0.0, _sum, aten.add.Tensor, back=True), any_order=True),
    "meshc.logcumsumexp_back": Operator(_scan(-inf, _logsumexp, aten.logaddexp.default, back=True), any_order=True),
    "cummax cummin": Operator(_extreme, any_order=True),
})
