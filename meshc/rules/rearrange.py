"""Sharding rules of operators that move entries (repeat, roll, flip, rot90, shuffles, complex views): moved dims are whole.

Dims whose entries move must be whole.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.rules.layout import dims_of
from meshc.rules.operator import Operator, declarations
from meshc.rules.reduction import argument
from meshc.rules.rule import ALONE, ONE, Relation, Rule, integer, integers, result_shapes, shape_of

aten = torch.ops.aten


def _repeat(node: Node, tensors: list[Node]) -> Rule:
    """Dims repeated once may be split; repeated dims are whole, since consecutive copies are not tiles of the operand's dim."""
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
    """Complex numbers as pairs along a last dim, or pairs as complex numbers."""
    letters = dims_of("d", min(shape_of(tensors[0]), result_shapes(node)[0], key=len))
    pair = (*letters, "pair")
    inside, out = (pair, letters) if node.target is aten.view_as_complex.default else (letters, pair)
    return Rule((inside,), (out,), ({},), frozenset({"pair"}))


def _flip(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (letters,), ({},), frozenset(letters[d] for d in integers(node.args[1])) - {ONE}, kind="layout")


def _rot90(node: Node, tensors: list[Node]) -> Rule:
    """k quarter turns of two dims: each turn transposes them and flips one, which must be whole; two turns flip both."""
    shape = shape_of(tensors[0])
    letters = dims_of("d", shape)
    turns = integer(argument(node, 1, "k", 1)) % 4
    a, b = (d % len(shape) for d in integers(argument(node, 2, "dims", [0, 1])))
    out = list(letters)
    if turns % 2:
        out[a], out[b] = out[b], out[a]
    flipped = {0: (), 1: (letters[b],), 2: (letters[a], letters[b]), 3: (letters[a],)}[turns]
    return Rule((letters,), (tuple(out),), ({},), frozenset(flipped) - {ONE}, kind="layout")


def _shuffle(node: Node, tensors: list[Node]) -> Rule:
    """Channels are permuted, so dim 1 is whole; the others may be split."""
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (letters,), ({},), frozenset({letters[1]}) - {ONE}, kind="layout")


def _pixels(node: Node, tensors: list[Node]) -> Rule:
    """[..., c * r * r, h, w] to [..., c, h * r, w * r], or back: channels are c major, rows and columns r minor."""
    inside, outside = shape_of(tensors[0]), result_shapes(node)[0]
    rank = len(inside)
    letters = [list(dims_of(side, shape)) for side, shape in (("i", inside), ("o", outside))]
    relations: list[Relation] = []
    whole: set[str] = set()
    for d in range(rank):
        if inside[d] == outside[d]:
            letters[1][d] = letters[0][d]
            continue
        if ONE in (letters[0][d], letters[1][d]):
            whole |= {letters[0][d], letters[1][d]} - {ONE}
            continue
        grows = outside[d] > inside[d]
        parts = (letters[not grows][d], f"#{max(inside[d], outside[d]) // min(inside[d], outside[d])}")
        relations.append(Relation(parts, (letters[1][d],)) if grows else Relation((letters[0][d],), parts))
    return Rule((tuple(letters[0]),), (tuple(letters[1]),), ({},), frozenset(whole), tuple(relations), kind="layout")


OPERATORS = declarations({
    "repeat": Operator(_repeat, moves=True, cheap=True),
    "roll": Operator(_roll, cheap=True),
    "flip": Operator(_flip, moves=True, cheap=True),
    "rot90": Operator(_rot90),
    "channel_shuffle": Operator(_shuffle),
    "pixel_shuffle pixel_unshuffle": Operator(_pixels),
    "view_as_complex view_as_real": Operator(_pairs, linear=ALONE),
})
