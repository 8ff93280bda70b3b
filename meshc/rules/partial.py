"""Deferrable reductions: operands that may enter an operator partial, and the reduction over which its result is then partial.

    relu(max over ranks of x)       =  max over ranks of relu(x)              it grows with x
    -(max over ranks of x)          =  min over ranks of -x                   it falls
    (sum over ranks of x) @ w       =  sum over ranks of x @ w                linear in each factor alone
    x[i], for x partial any way     =  partial the same way                   it picks entries
    (mean over ranks of x) + y      =  mean over ranks of x + y               affine in x

This lists all that is valid: a reduction may be deferred past the operator. `propagate` defers only reductions of sums, where that saves a
collective (`Rule.defers`), and completes the others first. Averages are listed as properties of the operators: a program has none, since it
divides a sum at once. NaN in a maximum or a minimum is left open, since backends differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch.fx import Node

from meshc.ir import operands, records
from meshc.rules.linear_operators import BLANKS, PICKS, SCALES, overloads, retained_operand
from meshc.rules.rule import Rule, dtype_of

aten = torch.ops.aten
FLIPPED = {"max": "min", "min": "max", "sum": "sum"}
EXTREMES = tuple(name for name, other in FLIPPED.items() if name != other)


@dataclass(frozen=True)
class Deferral:
    """Operands at `positions`, all partial by `reduction`, leave the result partial by `left` (not partial if `left` is "").

    Reductions are sum, max, min and avg. The other operands are whole on every rank.
    """

    positions: tuple[int, ...]
    reduction: str
    left: str


RISES = overloads(
    "relu sigmoid tanh exp exp2 expm1 sinh asinh atan erf floor ceil round trunc sign sgn hardtanh hardsigmoid softplus elu leaky_relu "
    "celu clamp clamp_min clamp_max add.Scalar sub.Scalar positive deg2rad rad2deg special_ndtr hardshrink softshrink nan_to_num "
    "round.decimals threshold special_modified_bessel_i1"
)
UNLESS_NEGATIVE: dict[object, tuple[str, ...]] = {
    aten.leaky_relu.default: ("negative_slope",),
    aten.elu.default: ("alpha", "scale", "input_scale"),
}
RISES_IN_FIRST = overloads("bucketize.Tensor ldexp.Tensor native_dropout_backward")
MINIMA: dict[object, dict[int, str]] = {
    **{op: {0: "min"} for op in overloads("log log2 log10 log1p sqrt acosh")},
    **{op: {0: "max"} for op in overloads("rsqrt special_modified_bessel_k0 special_modified_bessel_k1")},
    **{op: {0: "max"} for op in overloads("special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1")},
    aten.igamma.default: {0: "max", 1: "min"},
    aten.igammac.default: {0: "min", 1: "max"},
}
"""Operators that are monotone on their domain, all numbers above a bound: if a minimum is inside, so is every rank's part of it.

Position of an operand that may be partial by a minimum -> reduction by which the result is then partial.
"""
FALLS = overloads("neg erfc rsub.Scalar special_erfcx")
RISES_IN_EACH = overloads(
    "maximum minimum fmax fmin add.Tensor where.self clamp.Tensor clamp_min.Tensor clamp_max.Tensor logaddexp logaddexp2"
)
TOGETHER = {
    aten.maximum.default: "max",
    aten.minimum.default: "min",
    aten.fmax.default: "max",
    aten.fmin.default: "min",
    aten.amax.default: "max",
    aten.amin.default: "min",
    aten.max.default: "max",
    aten.min.default: "min",
    aten.clamp_min.Tensor: "max",
    aten.clamp_max.Tensor: "min",
}
"""Operators that equal a reduction, which commutes with them on all operands at once."""

SCALED = SCALES | overloads("mul.Scalar div.Scalar")
"""Operators that increase in their operand if the second argument is a number, and decrease if that is negative."""

BIASED = overloads("addmm baddbmm addbmm addmv addr addcmul")
"""Operators that increase in their first operand, which is multiplied by `beta`."""

AFFINE: dict[object, tuple[tuple[int, ...], ...]] = {
    **{op: ((0,),) for op in overloads("add.Scalar sub.Scalar rsub.Scalar add.Tensor sub.Tensor constant_pad_nd masked_fill.Scalar")},
    **{op: ((0,),) for op in overloads("index_fill.int_Scalar scatter.value")},
    **{op: ((1,),) for op in overloads("where.ScalarOther where.ScalarSelf")},
    aten.lerp.Tensor: ((2,),),
    aten.binary_cross_entropy_with_logits.default: ((1,),),
}
"""Operands in which, together, an operator is linear up to a constant of its call."""
JOINS = overloads(
    "cat stack block_diag where.self index_put scatter.src index_copy slice_scatter select_scatter diagonal_scatter masked_fill.Tensor "
    "index_fill.int_Tensor"
)
"""Operators whose result's entries are entries of operands, other than indices and conditions, or zero."""

LIKES = overloads(
    "zeros_like ones_like full_like empty_like zero fill.Scalar new_zeros new_ones new_full new_empty new_empty_strided"
)
"""Operators that use only the shape or dtype of their operand."""
ZEROS = overloads("zeros_like zero new_zeros")

FEW = 4
"""Up to this many operands, every subset is listed for partial averages."""


def deferrals(node: Node, rule: Rule) -> list[Deferral]:
    """All deferrals of this call. Complex numbers and booleans have sums at most."""
    count = len(rule.operands)
    if not count:
        return []
    if rule.settles:
        return [Deferral((0,), how, how) for how in EXTREMES] if _rounds(node) else []
    if node.target in LIKES:
        made = ("", "sum") if node.target in ZEROS else ("",)  # zeros add up to zero
        return [Deferral((0,), how, left) for how in ("sum", "avg", *(() if _complex(node) else EXTREMES)) for left in made]
    sums = _sums(node, rule)
    return list(dict.fromkeys([*sums, *_averages(node, sums, count), *_extremes(node, rule, count)]))


def _rounds(node: Node) -> bool:
    """Whether a cast keeps the order of numbers. As for sums, no rank's part may exceed the range of the new dtype."""
    source, target = dtype_of(operands(node)[0]), dtype_of(node)
    return node.target is aten._to_copy.default and not _complex(node) and source != torch.bool and target not in (torch.bool, torch.uint8)


def _sums(node: Node, rule: Rule) -> list[Deferral]:
    """Sums for linear operators, and all reductions for layout operators."""
    moved = [Deferral((0,), how, how) for how in ("sum", *(() if _complex(node) else EXTREMES))] if rule.kind == "layout" else []
    return [*moved, *(Deferral(positions, "sum", "sum") for positions in rule.linear)]


def _averages(node: Node, sums: list[Deferral], count: int) -> list[Deferral]:
    """An operator that accepts sums in operands J together accepts averages in any subset of J, the rest of J being whole on every rank.

    For f additive jointly in J, f(t / n) = f(t) / n, and the operands (x_i, y) of the ranks i, with x_i partial and y whole, have the mean
    (mean of x_i, y). So the mean of f(x_i, y) is f(mean of x_i, y). A constant added to f, as in AFFINE, is its own mean, while a sum over
    ranks would count it once for each rank.
    """
    affine = [positions for positions in AFFINE.get(node.target, ()) if max(positions) < count]
    together = [*(found.positions for found in sums), *affine]
    return [Deferral(chosen, "avg", "avg") for positions in together for chosen in _parts(positions)]


def _parts(positions: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All nonempty subsets of the positions; of more than FEW, only single positions and the whole set."""
    sizes = range(1, len(positions) + 1) if len(positions) <= FEW else sorted({1, len(positions)})
    return itertools.chain.from_iterable(itertools.combinations(positions, size) for size in sizes)


def _extremes(node: Node, rule: Rule, count: int) -> list[Deferral]:
    target, found = node.target, []
    weighted = any(name in node.kwargs for name in ("alpha", "reduce")) or target is aten.index_put.default and True in node.args[3:]
    data = [position for position, operand in enumerate(operands(node)) if dtype_of(operand).is_floating_point]
    if _complex(node) or weighted:
        return []
    if target in RISES_IN_FIRST or target in PICKS or _grows(node, count):
        found = [Deferral((0,), how, how) for how in EXTREMES]
    elif target in FALLS:
        found = [Deferral((0,), how, FLIPPED[how]) for how in EXTREMES]
    elif target in MINIMA:
        found = [Deferral((position,), "min", left) for position, left in MINIMA[target].items()]
    elif target in SCALED and count == 1 and isinstance(node.args[1], int | float):
        found = [Deferral((0,), how, how if node.args[1] >= 0 else FLIPPED[how]) for how in EXTREMES]
    elif target is aten.lerp.Scalar and 0 <= _weight(node, "weight") <= 1:
        found = [Deferral((place,), how, how) for place, how in itertools.product((0, 1), EXTREMES)]
    elif target in BLANKS:
        found = [Deferral((retained_operand(node),), how, how) for how in EXTREMES]
    elif target in RISES_IN_EACH or target in JOINS:
        found = [Deferral((position,), how, how) for position, how in itertools.product(data, EXTREMES)]
    elif target in (aten.sub.Tensor, aten.rsub.Tensor):
        rising, falling = ((0,), (1,)) if count == 2 else ((0,), ()) if isinstance(node.args[0], Node) else ((), (0,))
        if target is aten.rsub.Tensor:
            rising, falling = falling, rising
        found = [Deferral((place,), how, how) for place in rising for how in EXTREMES]
        found += [Deferral((place,), how, FLIPPED[how]) for place in falling for how in EXTREMES]
    if target in JOINS:
        found += [Deferral(tuple(data), how, how) for how in EXTREMES]
    if target in TOGETHER:
        found.append(Deferral(tuple(range(count)), TOGETHER[target], TOGETHER[target]))
    return found


def _grows(node: Node, count: int) -> bool:
    """Whether a call of an operator of RISES or BIASED increases in its first operand, by the numbers of its arguments."""
    if node.target in BIASED:
        return _weight(node, "beta") >= 0 or node.target is aten.addcmul.default
    if node.target is aten.threshold.default:
        return _weight(node, "value") <= _weight(node, "threshold")
    return node.target in RISES and count == 1 and all(_weight(node, name) >= 0 for name in UNLESS_NEGATIVE.get(node.target, ()))


def _weight(node: Node, name: str) -> float:
    """A numeric argument of the call, or its default; NaN, for which all comparisons are false, if the argument is no real number."""
    for argument, given in itertools.zip_longest(node.target._schema.arguments, node.args):  # type: ignore[union-attr]
        if argument.name == name:
            found = node.kwargs.get(name, argument.default_value) if given is None else given
            return float(found) if isinstance(found, int | float) else nan
    return nan


def _complex(node: Node) -> bool:
    """Whether an operand or result is complex: complex numbers have no order."""
    dtypes = [*map(dtype_of, operands(node)), *(result.dtype for result in records(node))]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)
