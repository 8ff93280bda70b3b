"""Sharding rules of matrix products and distances, an einsum each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.rule import Rule, RuleFunction, by_text, einsum, integers, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten

WEIGHT = {"k": "contracts", "n": "makes"}
TEXTS = {
    aten.mm.default: "m k, k n -> m n +k",
    aten.bmm.default: "b m k, b k n -> b m n +k",
    aten.mv.default: "m k, k -> m +k",
    aten.dot.default: "k, k -> +k",
    aten.vdot.default: "k, k -> +k",
    aten._euclidean_dist.default: "... m d!, ... n d! -> ... m n",
    aten._cdist_forward.default: "... m d!, ... n d! -> ... m n",
    aten._cdist_backward.default: "... m n, ... m d, ... n d, ... m n -> ... m d +n",
}


ROLES = {aten.mm.default: WEIGHT, aten.bmm.default: {"b": "multiplies", **WEIGHT}}


def _addmm(node: Node, tensors: list[Node]) -> Rule:
    """bias + x @ w. With k split the product is partial, so the bias is kept on one rank and counts once."""
    bias = " ".join("m n".split()[2 - len(shape_of(tensors[0])) :])
    return einsum(f"{bias}, m k, k n -> m n +k", node, tensors, lower=_lower_addmm, first=0, roles=WEIGHT)


def _lower_addmm(local: Local) -> Node:
    bias, x, w = local.operands
    bias = local.keep_first(bias, [axis for letter in local.rule.sums[0] for axis in local.axes(letter)])
    return local.call(bias, x, w)


def _baddbmm(node: Node, tensors: list[Node]) -> Rule:
    """bias + x @ w, batched; the bias broadcasts, and counts once where k is split."""
    bias = " ".join("b m n".split()[3 - len(shape_of(tensors[0])) :])
    return einsum(f"{bias}, b m k, b k n -> b m n +k", node, tensors, lower=_lower_addmm, first=0, roles=WEIGHT)


def _addmv(node: Node, tensors: list[Node]) -> Rule:
    bias = "m" if shape_of(tensors[0]) else ""
    return einsum(f"{bias}, m k, k -> m +k", node, tensors, lower=_lower_addmm, first=0)


def _addr(node: Node, tensors: list[Node]) -> Rule:
    """A matrix and the outer product of two vectors."""
    matrix = " ".join("m n".split()[2 - len(shape_of(tensors[0])) :])
    return einsum(f"{matrix}, m, n -> m n", node, tensors)


def _addbmm(node: Node, tensors: list[Node]) -> Rule:
    """bias + the sum of all x @ w of a batch."""
    bias = " ".join("m n".split()[2 - len(shape_of(tensors[0])) :])
    return einsum(f"{bias}, b m k, b k n -> m n +b +k", node, tensors, lower=_lower_addmm, first=0)


def _trilinear(node: Node, tensors: list[Node]) -> Rule:
    """Product of three operands, each without the dims in which it is expanded, summed over some dims: a bilinear layer."""
    without = [set(integers(argument)) for argument in node.args[3:6]]
    summed = set(integers(node.args[6]))
    rank = len(shape_of(tensors[0])) + len(without[0])
    letters = [[f"d{d}" for d in range(rank) if d not in expanded] for expanded in without]
    made = [f"d{d}" for d in range(rank) if d not in summed] + [f"+d{d}" for d in sorted(summed)]
    return einsum(f"{', '.join(map(' '.join, letters))} -> {' '.join(made)}", node, tensors)


RULES: dict[object, RuleFunction] = {
    **{op: by_text(text, roles=ROLES.get(op)) for op, text in TEXTS.items()},
    aten._trilinear.default: _trilinear,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _baddbmm,
    aten.addbmm.default: _addbmm,
    aten.addmv.default: _addmv,
    aten.addr.default: _addr,
}
