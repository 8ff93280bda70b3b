"""The placements on one axis that a rule of ours knows: one for each letter that it lets an axis split, and for what may come partial."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.rules.families import operator_of
from meshc.rules.losses import MEAN, loss, reduction_of
from meshc.rules.partial import deferrals
from meshc.testing.brute_force import OneOp, Sample, build
from tests.conformance.dtensor import Combination

MEANS = (torch.ops.aten.mean.default, torch.ops.aten.mean.dim)
EVERYWHERE = ("P(avg)", "P(max)", "P(min)")
"""What is whole on every rank is its own mean, maximum and minimum over the ranks."""
Dims = tuple[tuple[tuple[str, int], ...], ...]


def placements(sample: Sample) -> set[Combination]:
    """Combinations of operands' and results' placements that are letters of the rule, or partial operands that it lets through."""
    one = build(sample)
    if not one.instance.known:
        return set()
    found = {combination for token in one.tokens() if (combination := _split(one, token)) is not None}
    for deferral in deferrals(one.node, one.instance.rule):
        given = tuple(f"P({deferral.reduction})" if place in deferral.positions else "R" for place in range(len(one.tensors)))
        found.add((given, (f"P({deferral.left})" if deferral.left else "R",) * len(one.expected)))
    whole = {given for given, made in found if all(place == "R" for place in made)}
    found |= {(given, (name,) * len(one.expected)) for given in whole for name in EVERYWHERE}
    return {combination for combination in found if any(place != "R" for place in combination[0])}


def averages_parts(node: Node) -> bool:
    """Whether what the rule sums, each rank's part divided by the size of the whole, is the average of what equal parts give."""
    return node.target in MEANS or operator_of(node.target).rule is loss and reduction_of(node) == MEAN


def _split(one: OneOp, token: tuple[str, int]) -> Combination | None:
    """A letter's split; None where an inner factor of a dim is split, for which placements have no word, or a window needs neighbours."""
    instance = one.instance
    tied = instance.tied.get(token, token)
    if tied != token:
        window = instance.rule.windows[token[0]][1]
        if window.offset != 0 or window.span > window.stride:
            return None
    read = {tied: token}
    given = [_place(tuple(tuple(read.get(name, name) for name in row) for row in dims), token) for dims in instance.operands]
    made = []
    for dims, sums in zip(instance.results, instance.sums, strict=True):
        how = "avg" if averages_parts(one.node) else sums.get(token)
        made.append(f"P({how})" if token in sums else _place(dims, token))
    if None in given or None in made:
        return None
    return tuple(place or "" for place in given), tuple(place or "" for place in made)


def _place(dims: Dims, token: tuple[str, int]) -> str | None:
    for dim, row in enumerate(dims):
        if token in row:
            return f"S({dim})" if row[0] == token else None
    return "R"
