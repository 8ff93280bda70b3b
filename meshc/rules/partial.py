"""Deferrable reductions: operands that may enter an operator partial, and the reduction over which its result is then partial.

    relu(max over ranks of x)       =  max over ranks of relu(x)              it grows with x
    -(max over ranks of x)          =  min over ranks of -x                   it falls
    (sum over ranks of x) @ w       =  sum over ranks of x @ w                linear in each factor alone
    x[i], for x partial any way     =  partial the same way                   it picks entries
    (mean over ranks of x) + y      =  mean over ranks of x + y               affine in x

This lists all that is valid: a reduction may be deferred past the operator. `propagate` defers only reductions of sums, where that saves a
collective (`deferrals`), and completes the others first. Averages are listed as properties of the operators: a program has none, since it
divides a sum at once. NaN in a maximum or a minimum is left open, since backends differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch.fx import Node

from meshc.ir import operands, records
from meshc.ir.reductions import REDUCTIONS
from meshc.rules.families import operator_of
from meshc.rules.monotone import EXTREMES, data_operands, rising
from meshc.rules.operator import Deferral, Operator
from meshc.rules.rule import Rule, dtype_of

aten = torch.ops.aten

FEW = 4
"""Up to this many operands, every subset is listed for partial averages."""


def deferrals(node: Node, rule: Rule) -> list[Deferral]:
    """All deferrals of this call. Complex numbers and booleans have sums at most."""
    count, operator = len(rule.operands), operator_of(node.target)
    if not count:
        return []
    if rule.settles:
        return [Deferral((0,), how, how) for how in EXTREMES] if _rounds(node) else []
    if operator.of_shape:
        return [Deferral((0,), how, left) for how in (*_reductions(node), "avg") for left in operator.of_shape]
    sums = _sums(node, rule)
    return list(dict.fromkeys([*sums, *_averages(operator, sums, count), *_extremes(node, operator, count)]))


def _rounds(node: Node) -> bool:
    """Whether a cast keeps the order of numbers. As for sums, no rank's part may exceed the range of the new dtype."""
    source, target = dtype_of(operands(node)[0]), dtype_of(node)
    return node.target is aten._to_copy.default and not _complex(node) and source != torch.bool and target not in (torch.bool, torch.uint8)


def _sums(node: Node, rule: Rule) -> list[Deferral]:
    """Sums for linear operators, and all reductions for layout operators."""
    moved = [Deferral((0,), how, how) for how in _reductions(node)] if rule.kind == "layout" else []
    return [*moved, *(Deferral(positions, "sum", "sum") for positions in rule.linear)]


def _averages(operator: Operator, sums: list[Deferral], count: int) -> list[Deferral]:
    """An operator that accepts sums in operands J together accepts averages in any subset of J, the rest of J being whole on every rank.

    For f additive jointly in J, f(t / n) = f(t) / n, and the operands (x_i, y) of the ranks i, with x_i partial and y whole, have the mean
    (mean of x_i, y). So the mean of f(x_i, y) is f(mean of x_i, y). A constant added to f (`affine`) is its own mean, while a sum over
    ranks would count it once for each rank.
    """
    affine = [positions for positions in operator.affine if max(positions) < count]
    together = [*(found.positions for found in sums), *affine]
    return [Deferral(chosen, "avg", "avg") for positions in together for chosen in _parts(positions)]


def _parts(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All nonempty subsets of the positions; of more than FEW, only single positions and the whole set."""
    sizes = range(1, len(positions) + 1) if len(positions) <= FEW else sorted({1, len(positions)})
    return itertools.chain.from_iterable(itertools.combinations(positions, size) for size in sizes)


def _extremes(node: Node, operator: Operator, count: int) -> list[Deferral]:
    weighted = any(name in node.kwargs for name in ("alpha", "reduce")) or node.target is aten.index_put.default and True in node.args[3:]
    if _complex(node) or weighted:
        return []
    found = operator.monotone(node) if operator.monotone else []
    if operator.joins:
        data = data_operands(node)
        found = [*rising(*data), *(Deferral(tuple(data), how, how) for how in EXTREMES)]
    if operator.reduction:
        found.append(Deferral(tuple(range(count)), operator.reduction, operator.reduction))
    return found


def _reductions(node: Node) -> list[str]:
    """The reductions over which the operands of a call can be partial."""
    return [how for how in REDUCTIONS if how not in EXTREMES or not _complex(node)]


def _complex(node: Node) -> bool:
    """Whether an operand or result is complex: complex numbers have no order."""
    dtypes = [*map(dtype_of, operands(node)), *(result.dtype for result in records(node))]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)
