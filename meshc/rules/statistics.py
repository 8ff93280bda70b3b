"""Sharding rules of products, variances, norms and logsumexp: split, each is completed by one or two small collectives.

A product gathers the ranks' products; a variance sums twice. Results are not partial, except those of norms that are sums or extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

import torch
from torch.fx import Node

from meshc.ir.reductions import REDUCTIONS
from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Operator, declarations
from meshc.rules.reduction import completed_rule, reduce, result_dtype
from meshc.rules.rule import Local, Rule, RuleFunction, dtype_of
from meshc.rules.scan import gather_rows

aten = torch.ops.aten
Combine = Callable[[Local, Node, list[int], Sequence[str]], Node]
"""(local, x, reduced dims, axes that split them) -> the reduction of all ranks' x, with these dims kept as 1."""


def _whole_result_rule(combine: Combine) -> RuleFunction:
    """The rule of a reduction completed by `combine`."""

    def lower(local: Local, letters: list[str], axes: list[str]) -> Node:
        made = combine(local, local.operands[0], [int(letter[1:]) for letter in letters], axes)
        return local.emit(aten.reshape.default, made, list(local.out_shape(0)))

    return completed_rule(lower)


def _vector_norm(node: Node, tensors: list[Node]) -> Rule | None:
    """Norms of order 0 and 1 are partial sums, infinite orders a partial maximum or minimum; others are completed in `lower`."""
    how = {0.0: "sum", 1.0: "sum", inf: "max", -inf: "min"}.get(_order(node))
    if how is None:
        return _whole_result_rule(_norm)(node, tensors)
    return reduce(node, tensors, how, neutral=max(REDUCTIONS[how].neutral, 0.0))


def _mask_padding(local: Local, x: Node, dims: Sequence[int], value: float) -> Node:
    for dim in dims:
        x = local.neutralise(x, f"d{dim}", value)
    return x


def _count(local: Local, dims: Sequence[int]) -> int:
    return prod(local.global_size(f"d{dim}") for dim in dims)


def _prod(local: Local, x: Node, dims: list[int], axes: Sequence[str]) -> Node:
    mine = local.call(_mask_padding(local, x, dims, 1.0))
    return local.emit(aten.prod.dim_int, gather_rows(local, mine, axes), 0)


def _centred_squares(local: Local, x: Node, dims: list[int], axes: Sequence[str]) -> Node:
    """The sum of squared distances from the mean of all ranks."""
    total = local.all_reduce(local.emit(aten.sum.dim_IntList, _mask_padding(local, x, dims, 0.0), dims, True), axes, "sum")
    mean = local.emit(aten.div.Tensor, total, _count(local, dims))
    centred = _mask_padding(local, local.emit(aten.sub.Tensor, x, mean), dims, 0.0)
    if local.dtype(x).is_complex:
        centred = local.emit(aten.abs.default, centred)
    squares = local.emit(aten.mul.Tensor, centred, centred)
    return local.all_reduce(local.emit(aten.sum.dim_IntList, squares, dims, True), axes, "sum")


def _var(local: Local, x: Node, dims: list[int], axes: Sequence[str]) -> Node:
    free = max(_count(local, dims) - _correction(local.node), 0.0)
    return local.emit(aten.mul.Tensor, _centred_squares(local, x, dims, axes), 1 / free if free else inf)


def _correction(node: Node) -> float:
    named = named_arguments(node)
    return float(named["unbiased"]) if "unbiased" in named else _number(named["correction"], 1.0)


def _order(node: Node) -> float:
    named = named_arguments(node)
    return _number(named["p" if "p" in named else "ord"], 2.0)


def _number(given: object, default: float) -> float:
    if given is None:
        return default
    assert isinstance(given, int | float)
    return float(given)


def _std(local: Local, x: Node, dims: list[int], axes: Sequence[str]) -> Node:
    return local.emit(aten.sqrt.default, _var(local, x, dims, axes))


def _norm(local: Local, x: Node, dims: list[int], axes: Sequence[str]) -> Node:
    p = _order(local.node)
    x = _mask_padding(local, x, dims, inf if p < 0 else 0.0)
    mine = local.emit(aten.linalg_vector_norm.default, x, p, dims, True, **result_dtype(local))
    total = local.all_reduce(local.emit(aten.pow.Tensor_Scalar, mine, p), axes, "sum")
    return local.emit(aten.pow.Tensor_Scalar, total, 1.0 / p)


def _logsumexp(local: Local, x: Node, dims: list[int], axes: Sequence[str]) -> Node:
    wanted = dtype_of(local.node)
    if local.dtype(x) != wanted:
        x = local.emit(aten._to_copy.default, x, dtype=wanted)
    x = _mask_padding(local, x, dims, -inf)
    peak = local.all_reduce(local.emit(aten.amax.default, x, dims, True), axes, "max")
    endless = local.emit(aten.eq.Scalar, local.emit(aten.abs.default, peak), inf)
    peak = local.emit(aten.masked_fill.Scalar, peak, endless, 0.0)
    total = local.emit(aten.sum.dim_IntList, local.emit(aten.exp.default, local.emit(aten.sub.Tensor, x, peak)), dims, True)
    return local.emit(aten.add.Tensor, local.emit(aten.log.default, local.all_reduce(total, axes, "sum")), peak)


OPERATORS = declarations({
    "prod prod.dim_int": Operator(_whole_result_rule(_prod)),
    "var.correction var.dim": Operator(_whole_result_rule(_var), cheap=True),
    "std.correction std.dim": Operator(_whole_result_rule(_std)),
    "linalg_vector_norm norm.ScalarOpt_dim norm.Scalar": Operator(_vector_norm),
    "logsumexp": Operator(_whole_result_rule(_logsumexp)),
})
