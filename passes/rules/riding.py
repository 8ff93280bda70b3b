"""What may come into an operator still pending: which operands, over which reduction, and over which its result is then pending.

    relu(max over ranks of x)       =  max over ranks of relu(x)              it grows with x
    -(max over ranks of x)          =  min over ranks of -x                   it falls
    (sum over ranks of x) @ w       =  sum over ranks of x @ w                linear in each factor alone
    x[i], for x pending any way     =  pending the same way                   it picks entries

This is what is true; `propagate` lets sums ride where that saves a collective (`Rule.linear`), and finishes the others first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch.fx import Node

from meshc.ir import operands, records
from meshc.passes.rules.rule import Rule, dtype_of

aten = torch.ops.aten
EXTREMES = ("max", "min")
FLIPPED = {"max": "min", "min": "max", "sum": "sum"}


@dataclass(frozen=True)
class Ride:
    """Operands at these positions, all pending over `reduction` alike, leave the result pending over `left` (over nothing if it is "")."""

    positions: tuple[int, ...]
    reduction: str
    left: str


def _overloads(names: str) -> set[object]:
    """Operators by name: `exp`, `add.Scalar`."""
    found = set()
    for name in names.split():
        packet, _, overload = name.partition(".")
        found.add(getattr(getattr(aten, packet), overload or "default"))
    return found


RISES = _overloads(
    "relu sigmoid tanh exp exp2 expm1 sinh asinh atan erf floor ceil round trunc sign sgn hardtanh hardsigmoid softplus elu leaky_relu "
    "clamp clamp_min clamp_max add.Scalar sub.Scalar positive deg2rad rad2deg special_ndtr hardshrink softshrink nan_to_num "
    "round.decimals threshold special_modified_bessel_i1 bucketize.Tensor"
)
FALLS = _overloads("neg erfc rsub.Scalar special_erfcx")
RISES_IN_EACH = _overloads(
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
"""Of one reduction they are themselves: it may be done before or after, on all operands at once."""

PRODUCTS = _overloads("mul.Tensor mm bmm mv dot vdot linalg_cross")
BIASED = _overloads("addmm baddbmm addbmm addmv")
LINEAR_IN_FIRST = _overloads(
    "div.Tensor ldexp.Tensor xlogy.Tensor xlogy.Scalar_Other special_xlog1py "
    "cumsum tril triu view_as_real view_as_complex real imag conj_physical _conj grid_sampler_2d grid_sampler_3d "
    "threshold_backward tanh_backward sigmoid_backward silu_backward gelu_backward hardtanh_backward leaky_relu_backward softplus_backward "
    "mish_backward hardswish_backward hardsigmoid_backward log_sigmoid_backward native_dropout_backward _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm_backward avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward upsample_nearest2d "
    "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d upsample_bicubic2d upsample_nearest3d _upsample_nearest_exact3d "
    "upsample_trilinear3d upsample_nearest2d.vec upsample_bilinear2d upsample_bilinear2d.vec "
    "upsample_nearest2d_backward upsample_bilinear2d_backward _upsample_bilinear2d_aa max_unpool2d max_unpool3d "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward cholesky_solve"
)
RUNS = (torch.ops.meshc.grouped_mm.default, torch.ops.meshc.grouped_outer.default)
LINEAR_IN_SECOND = _overloads("linalg_solve_triangular")
LINEAR_IN_THIRD = _overloads("linalg_lu_solve")
LINEAR_TOGETHER = {
    aten.where.self: (1, 2),
    aten.complex.default: (0, 1),
    aten.index_add.default: (0, 2),
    aten.scatter_add.default: (0, 2),
    aten.scatter.src: (0, 2),
    aten.index_copy.default: (0, 2),
    aten.masked_fill.Tensor: (0, 2),
    aten.index_fill.int_Tensor: (0, 2),
    aten.index_put.default: (0, -1),
    aten._unsafe_index_put.default: (0, -1),
}
PICKS = _overloads(
    "index_select gather embedding index.Tensor _unsafe_index.Tensor reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d unfold_copy"
)
"""Every entry of their result is an entry of operand 0."""

JOINS = _overloads(
    "cat stack where.self scatter.src index_copy slice_scatter select_scatter diagonal_scatter masked_fill.Tensor index_fill.int_Tensor"
)
"""Every entry of their result is an entry of some operand that is no index and no condition."""

BLANKS = _overloads("masked_fill.Scalar where.ScalarOther index_fill.int_Scalar")
"""Some entries become a number."""


LIKES = _overloads(
    "zeros_like ones_like full_like empty_like zero fill.Scalar new_zeros new_ones new_full new_empty new_empty_strided"
)
"""Nothing of their operand matters but its shape or its dtype."""


def rides(node: Node, rule: Rule) -> list[Ride]:
    """Everything that may ride through this call. Complex numbers and truths have sums at most."""
    count = len(rule.operands)
    if rule.settles or not count:
        return []
    if node.target in LIKES:
        return [Ride((0,), how, "") for how in ("sum", *(() if _complex(node) else EXTREMES))]
    found = [*_linear(node, rule, count), *_multilinear(node, count), *_extremes(node, rule, count)]
    return list(dict.fromkeys(found))


def _linear(node: Node, rule: Rule, count: int) -> list[Ride]:
    if rule.kind == "layout":
        return [Ride((0,), how, how) for how in ("sum", *(() if _complex(node) else EXTREMES))]
    positions = {"each": (0,), "first": (0,), "all": tuple(range(count))}.get(rule.linear)
    return [] if positions is None else [Ride(positions, "sum", "sum")]


def _multilinear(node: Node, count: int) -> list[Ride]:
    target = node.target
    alone: list[tuple[int, ...]] = []
    if target in PRODUCTS:
        alone = [(position,) for position in range(count)]
    elif target in RUNS:
        alone = [(0,), (1,)]
    elif target in BIASED:
        alone = [(0, 1), (0, 2)]
    elif target is aten.convolution.default:
        alone = [(0, *range(2, count)), (1, *range(2, count))]
    elif target in LINEAR_IN_FIRST or target in PICKS:
        alone = [(0,)]
    elif target in LINEAR_IN_SECOND:
        alone = [(1,)]
    elif target in LINEAR_IN_THIRD:
        alone = [(2,)]
    elif target in LINEAR_TOGETHER:
        alone = [tuple(position % count for position in LINEAR_TOGETHER[target])]
    elif target in BLANKS and node.args[-1] == 0:
        alone = [(int(target is aten.where.ScalarOther),)]
    return [Ride(positions, "sum", "sum") for positions in alone]


def _extremes(node: Node, rule: Rule, count: int) -> list[Ride]:
    target, found = node.target, []
    weighted = any(name in node.kwargs for name in ("alpha", "reduce"))
    data = [position for position, operand in enumerate(operands(node)) if dtype_of(operand).is_floating_point]
    if _complex(node) or weighted:
        return []
    if target in RISES and (count == 1 or target is aten.bucketize.Tensor) or target in PICKS:
        found = [Ride((0,), how, how) for how in EXTREMES]
    elif target in FALLS:
        found = [Ride((0,), how, FLIPPED[how]) for how in EXTREMES]
    elif target in BLANKS:
        found = [Ride((int(target is aten.where.ScalarOther),), how, how) for how in EXTREMES]
    elif target in RISES_IN_EACH or target in JOINS:
        found = [Ride((position,), how, how) for position, how in itertools.product(data, EXTREMES)]
    elif target is aten.sub.Tensor:
        rising, falling = ((0,), (1,)) if count == 2 else ((0,), ()) if isinstance(node.args[0], Node) else ((), (0,))
        found = [Ride((place,), how, how) for place in rising for how in EXTREMES]
        found += [Ride((place,), how, FLIPPED[how]) for place in falling for how in EXTREMES]
    if target in JOINS:
        found += [Ride(tuple(data), how, how) for how in EXTREMES]
    if target in TOGETHER:
        found.append(Ride(tuple(range(count)), TOGETHER[target], TOGETHER[target]))
    return found


def _complex(node: Node) -> bool:
    """Whether complex numbers take part: they have no order."""
    dtypes = [*map(dtype_of, operands(node)), *(result.dtype for result in records(node))]
    return any(dtype is not None and dtype.is_complex for dtype in dtypes)
