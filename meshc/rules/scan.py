"""Sharding rules of scans (cumsum, cummax, ...): each rank scans its tile and combines it with the totals of the tiles before.

Tiles of a scanned dim must follow each other, so only its first factor may be split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch.fx import Node

from meshc.ir import records
from meshc.ir.functions import Target
from meshc.ops import scan_back as _operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ALONE, CPU, Local, Made, Rule, RuleFunction, dim_of, dtype_of, letters_of, where_split

aten, meshc = torch.ops.aten, torch.ops.meshc
Fold = Callable[[Local, Node], Node]
"""(local, totals) -> reduction of `totals` over dim 0."""


def _scan(neutral: float, fold: Fold, join: Target, back: bool = False) -> RuleFunction:
    """`fold` reduces the totals of the tiles before this one (`neutral` in place of the others); `join` combines that with each entry.
    `back`: a scan from the end, so of the tiles behind.
    """

    def lower(local: Local, letter: str, axes: Sequence[str]) -> Node:
        mine = local.call(local.neutralise(local.operands[0], letter, neutral))
        totals = _totals(local, mine, axes, int(letter[1:]), back)
        # an int for integer totals: a float would change their dtype
        value = neutral if local.dtype(totals).is_floating_point or local.dtype(totals).is_complex else int(neutral)
        return local.emit(join, mine, fold(local, local.emit(aten.where.ScalarOther, on_side(local, totals, axes, back), totals, value)))

    return _scan_rule(lower)


def _scan_rule(lower: Callable[[Local, str, Sequence[str]], Made]) -> RuleFunction:
    """The rule of a scan; `lower` gets the letter along which it goes and the axes that split it."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        letters, count = letters_of(tensors[0]), len(records(node))
        if not letters:
            return Rule((letters,), (letters,) * count)
        letter = letters[dim_of(node, letters)]
        split = where_split(letter, lambda local: lower(local, letter, local.axes(letter)))
        return Rule((letters,), (letters,) * count, lower=split, self_masked=True, major={letter})

    return rule


def _totals(local: Local, scanned: Node, axes: Sequence[str], dim: int, back: bool = False) -> Node:
    """The total of each tile, gathered along a new first dim."""
    at = 0 if back else local.shape(scanned)[dim] - 1
    return gather_rows(local, local.emit(aten.slice.Tensor, scanned, dim, at, at + 1), axes)


def gather_rows(local: Local, x: Node, axes: Sequence[str]) -> Node:
    """Every rank's x along a new first dim."""
    return local.all_gather(local.emit(aten.unsqueeze.default, x, 0), axes, 0)


def on_side(local: Local, gathered: Node, axes: Sequence[str], back: bool = False, dim: int = 0) -> Node:
    """Mask of what is gathered along a dim from the ranks before this one, or with `back` behind it."""
    shape = [size if place == dim else 1 for place, size in enumerate(local.shape(gathered))]
    places = local.emit(aten.arange.default, shape[dim], dtype=torch.int64, device=CPU)
    return local.emit(aten.reshape.default, local.emit((aten.gt if back else aten.lt).Scalar, places, local.index(axes)), shape)


def _sum(local: Local, totals: Node) -> Node:
    return local.emit(aten.sum.dim_IntList, totals, [0])


def _prod(local: Local, totals: Node) -> Node:
    return local.emit(aten.prod.dim_int, totals, 0)


def _logsumexp(local: Local, totals: Node) -> Node:
    return local.emit(aten.logsumexp.default, totals, [0])


def _lower_extreme(local: Local, letter: str, axes: Sequence[str]) -> Made:
    """cummax and cummin: (value, index). Of equal values the last counts, so an earlier tile's is used only if it is better."""
    (x,), dim = local.operands, int(letter[1:])
    largest = local.node.target is aten.cummax.default
    worst = _worst(local.dtype(x), largest)
    scanned = local.call(local.neutralise(x, letter, worst))
    value, place = local.item(scanned, 0), local.emit(aten.add.Tensor, local.item(scanned, 1), local.start(letter))
    values, places = (_totals(local, one, axes, dim) for one in (value, place))
    found = local.emit(local.node.target, local.emit(aten.where.ScalarOther, on_side(local, values, axes), values, worst), 0)
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
    "cummax cummin": Operator(_scan_rule(_lower_extreme), any_order=True),
})
