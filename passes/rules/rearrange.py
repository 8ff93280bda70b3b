"""Operators that put entries elsewhere: repeats, rolls, flips, pairs of numbers as complex ones. What moves must be whole."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.passes.rules.layout import dims_of
from meshc.passes.rules.rule import ONE, Rule, RuleFunction, integers, result_shapes, shape_of

aten = torch.ops.aten


def _repeat(node: Node, tensors: list[Node]) -> Rule:
    """Dims repeated once pass; copies one after the other would be tiles of nothing that a split could name."""
    source, repeats = shape_of(tensors[0]), integers(node.args[1])
    shift = len(repeats) - len(source)
    inside, out = list(dims_of("d", source)), []
    whole: set[str] = set()
    for i, count in enumerate(repeats):
        if i >= shift and count == 1:
            out.append(inside[i - shift])
            continue
        out.append(f"o{i}" if result_shapes(node)[0][i] != 1 else ONE)
        whole |= {out[-1]} | ({inside[i - shift]} if i >= shift else set())
    return Rule((tuple(inside),), (tuple(out),), ({},), frozenset(whole - {ONE}), kind="layout")


def _roll(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dims", [])
    moved = letters if not dims else tuple(letters[d] for d in integers(dims))
    return Rule((letters,), (letters,), ({},), frozenset(moved) - {ONE}, kind="layout")


def _pairs(node: Node, tensors: list[Node]) -> Rule:
    """Complex numbers as pairs along a last dim, and back."""
    letters = dims_of("d", min(shape_of(tensors[0]), result_shapes(node)[0], key=len))
    pair = (*letters, "pair")
    inside, out = (pair, letters) if node.target is aten.view_as_complex.default else (letters, pair)
    return Rule((inside,), (out,), ({},), frozenset({"pair"}))


def _flip(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (letters,), ({},), frozenset(letters[d] for d in integers(node.args[1])) - {ONE}, kind="layout")


RULES: dict[object, RuleFunction] = {
    aten.repeat.default: _repeat,
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.view_as_complex.default: _pairs,
    aten.view_as_real.default: _pairs,
}
