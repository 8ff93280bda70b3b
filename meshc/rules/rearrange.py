"""Sharding rules of operators that move entries (repeat, roll, flip, rot90, shuffles, complex views): moved dims are whole.

Dims whose entries move must be whole.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ALONE, Relation, Rule, dims_of, shape_of

aten = torch.ops.aten


def _repeat(node: Node, tensors: list[Node]) -> Rule:
    """Dims repeated once may be split; repeated dims are whole, since consecutive copies are not tiles of the operand's dim."""
    repeats, inside, out = named_arguments(node)["repeats"], dims_of("d", shape_of(tensors[0])), list(dims_of("o", shape_of(node)))
    shift, whole = len(repeats) - len(inside), {*inside, *out}
    for dim, letter in enumerate(inside, shift):
        if repeats[dim] == 1:
            out[dim] = letter
            whole -= {letter}
    return Rule((inside,), (tuple(out),), whole=whole, kind="layout")


def _move(node: Node, tensors: list[Node]) -> Rule:
    """roll, flip: entries move along `dims`, of roll along all where it names none."""
    letters = dims_of("d", shape_of(tensors[0]))
    dims = named_arguments(node)["dims"]
    moved = {letters[dim] for dim in dims} if dims or node.target is aten.flip.default else {*letters}
    return Rule((letters,), (letters,), whole=moved, kind="layout")


def _pairs(node: Node, tensors: list[Node]) -> Rule:
    """Complex numbers as pairs along a last dim, or pairs as complex numbers."""
    letters = dims_of("d", min(shape_of(tensors[0]), shape_of(node), key=len))
    pair = (*letters, "pair")
    inside, out = (pair, letters) if node.target is aten.view_as_complex.default else (letters, pair)
    return Rule((inside,), (out,), whole={"pair"})


def _rot90(node: Node, tensors: list[Node]) -> Rule:
    """k quarter turns of two dims: each turn transposes them and flips one, which must be whole; two turns flip both."""
    letters, named = dims_of("d", shape_of(tensors[0])), named_arguments(node)
    turns, (a, b), out = named["k"] % 4, named["dims"], list(letters)
    if turns % 2:
        out[a], out[b] = out[b], out[a]
    flipped: set[str] = {0: set(), 1: {letters[b]}, 2: {letters[a], letters[b]}, 3: {letters[a]}}[turns]
    return Rule((letters,), (tuple(out),), whole=flipped, kind="layout")


def _shuffle(node: Node, tensors: list[Node]) -> Rule:
    """Channels are permuted, so dim 1 is whole; the others may be split."""
    letters = dims_of("d", shape_of(tensors[0]))
    return Rule((letters,), (letters,), whole={letters[1]}, kind="layout")


def _pixels(node: Node, tensors: list[Node]) -> Rule:
    """[..., c * r * r, h, w] to [..., c, h * r, w * r], or back: channels are c major, rows and columns r minor."""
    source, target = shape_of(tensors[0]), shape_of(node)
    inside, out = dims_of("i", source), list(dims_of("o", target))
    relations: list[Relation] = []
    whole: set[str] = set()
    for dim, (before, after) in enumerate(zip(source, target, strict=True)):
        if before == after:
            out[dim] = inside[dim]
        elif 1 in (before, after):
            whole |= {inside[dim], out[dim]}
        elif after > before:
            relations.append(Relation((inside[dim], f"#{after // before}"), (out[dim],)))
        else:
            relations.append(Relation((inside[dim],), (out[dim], f"#{before // after}")))
    return Rule((inside,), (tuple(out),), whole=whole, relations=tuple(relations), kind="layout")


OPERATORS = declarations({
    "repeat": Operator(_repeat, moves=True, cheap=True),
    "roll": Operator(_move, cheap=True),
    "flip": Operator(_move, moves=True, cheap=True),
    "rot90": Operator(_rot90),
    "channel_shuffle": Operator(_shuffle),
    "pixel_shuffle pixel_unshuffle": Operator(_pixels),
    "view_as_complex view_as_real": Operator(_pairs, linear=ALONE),
})
