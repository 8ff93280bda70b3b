"""Sharding rules of pointwise operators, and of dropout and random draws, which are numbered by global position."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.fx import Node

from meshc.ir import is_tensor, record
from meshc.ops import random as _random_operators  # noqa: F401 - registers them
from meshc.rules.monotone import (
    falls,
    falls_then_rises,
    minima,
    rises,
    rises_between,
    rises_by_number,
    rises_by_threshold,
    rises_in_each,
    rises_in_first,
    rises_in_second,
    rises_then_falls,
    rises_unless_negative,
)
from meshc.rules.operator import EITHER, SUM_AND_PRODUCT, Operator, declarations
from meshc.rules.preconditions import Operands, divides, holds
from meshc.rules.rule import ALONE, Local, Rule, dim_of, draw, letters_of, pointwise

aten = torch.ops.aten
meshc = torch.ops.meshc


def is_pointwise(node: Node) -> bool:
    """Whether an out-of-place operator is pointwise: by torch's tag, or by its record."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target in OPERATORS and OPERATORS[target].pointwise


def always(node: Node) -> bool:
    return True


def by_one_number(node: Node) -> bool:
    """Whether a product or quotient is a multiple of one operand by one number."""
    left, right = node.args[:2]
    return isinstance(left, Node) and (not isinstance(right, Node) or (is_tensor(right) and record(right).shape == ()))


def _dropout(node: Node, tensors: list[Node]) -> Rule:
    """dropout(x, seed_step, call, p, global, local, offsets): draws by global index, so any factor may be split."""
    x = pointwise(node, tensors[:1])
    return replace(x, operands=(*x.operands, ("_seed",)), whole={"_seed"}, lower=draw)


def _glu(node: Node, tensors: list[Node]) -> Rule:
    """Product of the halves of one dim, which is whole; other dims may be split."""
    full = list(letters_of(tensors[-1]))
    dim = dim_of(node, full)
    half = (*full[:dim], "h", *full[dim + 1 :])
    full[dim] = "c"
    ins, out = ((tuple(full),), half) if len(tensors) == 1 else ((half, tuple(full)), tuple(full))
    return Rule(ins, (out,), whole={"c", "h"})


def _draw(node: Node, tensors: list[Node]) -> Rule:
    return Rule((("_seed",),), (letters_of(node),), whole={"_seed"}, lower=_lower_draw)


def _lower_draw(local: Local) -> Node:
    """The drawn tile has a dim for each factor, and is then reshaped to the dims of the result."""
    return local.emit(aten.reshape.default, draw(local), list(local.out_shape(0)))


MOST_DEGREE: Final = 1 << 12
"""Of a polynomial, each of whose elements takes a step a degree; of what is a sum of so many terms an element."""


def _term_fault(o: Operands) -> str | None:
    return None if o["p"] <= MOST_DEGREE else f"p is at most {MOST_DEGREE}"


def _degree_fault(o: Operands) -> str | None:
    given = o["n"]
    if isinstance(given, Tensor):
        too_high = not given.is_meta and bool((given > MOST_DEGREE).any())
    else:
        too_high = not given <= MOST_DEGREE
    return f"n is a degree of at most {MOST_DEGREE}" if too_high else None


def _least_fault(o: Operands) -> str | None:
    for name in ("self", "other"):
        given = o[name]
        if not given.is_meta and given.numel() and bool((given == torch.iinfo(given.dtype).min).any()):
            return f"{name} holds {torch.iinfo(given.dtype).min}, whose negative is no {given.dtype}"
    return None


NEGATED: Final = {
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip
"""What `neg` has a kernel for. A negated view calls it where somebody reads, by then without a line to name."""


_DIVIDES = (divides("self", "other"),)
_POLYNOMIALS = (
    *(f"{shifted}chebyshev_polynomial_{letter}" for shifted in ("", "shifted_") for letter in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p",
)  # fmt: skip

OPERATORS = declarations({
    "glu glu_backward": Operator(_glu),
    "meshc.dropout": Operator(_dropout, cheap=True),
    "meshc.uniform meshc.normal": Operator(_draw, cheap=True),
    "meshc.keep_mask": Operator(_draw),
    "addcdiv": Operator(linear=((0, 1),)),
    "lerp.Tensor": Operator(linear=((0, 1),), affine=((2,),)),
    "add.Tensor": Operator(linear=((0, 1),), defers=always, monotone=rises_in_each, affine=ALONE),
    "sub.Tensor": Operator(linear=((0, 1),), defers=always, monotone=rises_then_falls, affine=ALONE),
    "lerp.Scalar": Operator(linear=((0, 1),), monotone=rises_between),
    "conj_physical imag real special_xlog1py xlogy.Scalar_Other xlogy.Tensor": Operator(linear=ALONE),
    "neg": Operator(linear=ALONE, defers=always, monotone=falls),
    "div.Scalar mul.Scalar": Operator(linear=ALONE, defers=always, monotone=rises_by_number),
    "div.Tensor": Operator(linear=ALONE, defers=by_one_number, monotone=rises_by_number),
    "deg2rad positive rad2deg": Operator(linear=ALONE, monotone=rises),
    "ldexp.Tensor": Operator(linear=ALONE, monotone=rises_in_first),
    "mul.Tensor": Operator(linear=EITHER, defers=by_one_number, monotone=rises_by_number),
    "addcmul": Operator(linear=SUM_AND_PRODUCT, monotone=rises_in_first),
    "erfc special_erfcx": Operator(monotone=falls),
    "igamma": Operator(monotone=minima({0: "max", 1: "min"})),
    "rsqrt special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1": Operator(monotone=minima({0: "max"})),
    "igammac": Operator(monotone=minima({0: "min", 1: "max"})),
    "acosh log log10 log1p log2 sqrt": Operator(monotone=minima({0: "min"})),
    "asinh atan ceil celu clamp clamp_max clamp_min erf exp exp2 expm1 floor hardshrink hardsigmoid hardtanh nan_to_num relu "
    "round round.decimals sgn sigmoid sign sinh softplus softshrink special_modified_bessel_i1 special_ndtr tanh trunc": Operator(
        monotone=rises
    ),
    "add.Scalar sub.Scalar": Operator(monotone=rises, affine=ALONE),
    "threshold": Operator(monotone=rises_by_threshold),
    "clamp.Tensor logaddexp logaddexp2": Operator(monotone=rises_in_each),
    "clamp_min.Tensor fmax maximum": Operator(monotone=rises_in_each, reduction="max"),
    "clamp_max.Tensor fmin minimum": Operator(monotone=rises_in_each, reduction="min"),
    "elu": Operator(monotone=rises_unless_negative("alpha", "scale", "input_scale")),
    "leaky_relu": Operator(monotone=rises_unless_negative("negative_slope")),
    "_prelu_kernel _prelu_kernel_backward copy elu_backward hardswish log_sigmoid_forward "
    "meshc.dropout_backward rrelu_with_noise_backward": Operator(pointwise=True),
    "floor_divide": Operator(pointwise=True, preconditions=_DIVIDES),
    "div.Tensor_mode div.Scalar_mode floor_divide.Scalar fmod.Scalar fmod.Tensor remainder.Scalar remainder.Scalar_Tensor "
    "remainder.Tensor": Operator(preconditions=_DIVIDES),
    "lcm gcd": Operator(preconditions=(_least_fault,)),
    "mvlgamma": Operator(preconditions=(_term_fault,)),
    **{
        f"special_{kind} special_{kind}.n_scalar special_{kind}.x_scalar": Operator(preconditions=(_degree_fault,))
        for kind in _POLYNOMIALS
    },
    "_neg_view": Operator(preconditions=(holds("self is of a dtype that has negatives", lambda o: o["self"].dtype in NEGATED),)),
    "where.ScalarSelf": Operator(pointwise=True, affine=((1,),)),
    "complex": Operator(pointwise=True, linear=((0, 1),)),
    "rsub.Tensor": Operator(pointwise=True, linear=((0, 1),), monotone=falls_then_rises),
    "masked_fill.Tensor": Operator(pointwise=True, linear=((0, 2),), joins=True),
    "where.self": Operator(pointwise=True, linear=((1, 2),), joins=True),
    "gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward log_sigmoid_backward "
    "mish_backward polar sigmoid_backward silu_backward softplus_backward tanh_backward threshold_backward": Operator(
        pointwise=True, linear=ALONE
    ),
    "_conj": Operator(pointwise=True, linear=ALONE, defers=always),
    "native_dropout_backward": Operator(pointwise=True, linear=ALONE, monotone=rises_in_first),
    "masked_fill.Scalar": Operator(pointwise=True, linear_at_zero=True, monotone=rises_in_first, affine=ALONE),
    "where.ScalarOther": Operator(pointwise=True, linear_at_zero=True, monotone=rises_in_second, affine=((1,),)),
    "rsub.Scalar": Operator(pointwise=True, monotone=falls, affine=ALONE),
    "zero": Operator(pointwise=True, of_shape=("", "sum")),
    "zeros_like": Operator(pointwise=True, of_shape=("", "sum"), any_order=True),
    "empty_like": Operator(pointwise=True, of_shape=("",), uninitialised=True),
    "fill.Scalar": Operator(pointwise=True, of_shape=("",)),
    "full_like ones_like": Operator(pointwise=True, of_shape=("",), any_order=True),
})
