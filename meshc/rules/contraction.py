"""Sharding rules of matrix products and distances, an einsum each."""

from __future__ import annotations

from math import prod
from typing import Any, Final

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.monotone import rises_by_beta
from meshc.rules.operator import EITHER, SUM_AND_PRODUCT, Operator, Shapes, declarations
from meshc.rules.preconditions import Operands, holds, like, same_dtype
from meshc.rules.rule import Local, Rule, RuleFunction, by_text, count_once, einsum, shape_of

aten = torch.ops.aten

WEIGHT = {"k": "contracts", "n": "makes"}


def _biased_product(text: str, **fields: Any) -> RuleFunction:
    """bias + a product, by the product's text. The bias broadcasts, and counts once where the product is partial."""
    made = [letter for letter in text.partition("-> ")[2].split() if letter[0] != "+"]

    def rule(node: Node, tensors: list[Node]) -> Rule:
        bias = made[len(made) - len(shape_of(tensors[0])) :]
        return einsum(f"{' '.join(bias)}, {text}", node, tensors, **fields)

    return rule


def _lower_biased(local: Local) -> Node:
    bias, *factors = local.operands
    return local.call(count_once(local, bias), *factors)


_ONCE: Final = {"lower": _lower_biased, "once": {0}, "first": 0}


def _trilinear(node: Node, tensors: list[Node]) -> Rule:
    """Product of three operands, each without the dims in which it is expanded, summed over some dims: a bilinear layer."""
    named = named_arguments(node)
    without, summed = [named[f"expand{number}"] for number in (1, 2, 3)], named["sumdim"]
    rank = len(shape_of(tensors[0])) + len(without[0])
    letters = [[f"d{d}" for d in range(rank) if d not in expanded] for expanded in without]
    made = [f"d{d}" for d in range(rank) if d not in summed] + [f"+d{d}" for d in sorted(summed)]
    return einsum(f"{', '.join(map(' '.join, letters))} -> {' '.join(made)}", node, tensors)


def product_flops(node: Node, shapes: Shapes) -> float:
    """Of two operands, the first whole, by the columns of the second."""
    return 2.0 * prod(shapes[0]) * shapes[1][-1]


def _biased_flops(node: Node, shapes: Shapes) -> float:
    return product_flops(node, shapes[1:])


def _vector_flops(node: Node, shapes: Shapes) -> float:
    return 2.0 * prod(shapes[0])


PDIST_GRAD = aten._pdist_backward.default._schema.arguments[0].name
"""`grad`, and `grad_output` from torch 2.14 on."""


def _has_pairs(o: Operands) -> bool:
    rows = o["self"].shape[0]
    return rows > 0 and o["self"].dim() == 2 and o[PDIST_GRAD].shape == o["pdist"].shape == (rows * (rows - 1) // 2,)


OPERATORS = declarations({
    "mm": Operator(by_text("m k, k n -> m n +k", roles=WEIGHT), linear=EITHER, flops=product_flops),
    "bmm": Operator(
        by_text("b m k, b k n -> b m n +k", roles={"b": "multiplies", **WEIGHT}), linear=EITHER, flops=product_flops
    ),
    "mv": Operator(by_text("m k, k -> m +k"), linear=EITHER, flops=_vector_flops),
    "dot": Operator(by_text("k, k -> +k"), linear=EITHER, flops=_vector_flops),
    "vdot": Operator(by_text("k, k -> +k"), linear=EITHER),
    "_euclidean_dist _cdist_forward": Operator(by_text("... m d!, ... n d! -> ... m n")),
    "_cdist_backward": Operator(
        by_text("... m n, ... m d, ... n d, ... m n -> ... m d +n"),
        preconditions=(
            like("cdist", "grad"),
            same_dtype("grad", "x1", "x2", "cdist"),
            holds(
                "cdist is what x1 and x2 make",
                lambda o: o["cdist"].shape == aten._cdist_forward(o["x1"].to("meta"), o["x2"].to("meta"), o["p"], None).shape,
            ),
        ),
    ),
    "_pdist_backward": Operator(
        preconditions=(
            holds("grad and pdist have a number for each pair of rows", _has_pairs),
            same_dtype(PDIST_GRAD, "self", "pdist"),
        )
    ),
    "_trilinear": Operator(_trilinear),
    "addmm": Operator(
        _biased_product("m k, k n -> m n +k", **_ONCE, roles=WEIGHT),
        linear=SUM_AND_PRODUCT,
        monotone=rises_by_beta,
        any_order=True,
        flops=_biased_flops,
    ),
    "baddbmm": Operator(
        _biased_product("b m k, b k n -> b m n +k", **_ONCE, roles=WEIGHT),
        linear=SUM_AND_PRODUCT,
        monotone=rises_by_beta,
        flops=_biased_flops,
    ),
    "addbmm": Operator(_biased_product("b m k, b k n -> m n +b +k", **_ONCE), linear=SUM_AND_PRODUCT, monotone=rises_by_beta),
    "addmv": Operator(_biased_product("m k, k -> m +k", **_ONCE), linear=SUM_AND_PRODUCT, monotone=rises_by_beta),
    "addr": Operator(_biased_product("m, n -> m n"), linear=SUM_AND_PRODUCT, monotone=rises_by_beta),
})
