"""The placements on one axis that a rule of ours knows: one for each letter that it lets an axis split, and for what may ride."""

from __future__ import annotations

from meshc.passes.rules.riding import rides
from tests.conformance.dtensor import Combination
from tests.rules.brute_force import OneOp, Sample, build

Dims = tuple[tuple[tuple[str, int], ...], ...]


def placements(sample: Sample) -> set[Combination]:
    """Combinations of operands' and results' placements that are letters of the rule, or pending operands that it lets through."""
    one = build(sample)
    if not one.instance.known:
        return set()
    found = {combination for token in one.tokens() if (combination := _split(one, token)) is not None}
    for ride in rides(one.node, one.instance.rule):
        given = tuple(f"P({ride.reduction})" if place in ride.positions else "R" for place in range(len(one.tensors)))
        found.add((given, (f"P({ride.left})" if ride.left else "R",) * len(one.expected)))
    return {combination for combination in found if any(place != "R" for place in combination[0])}


def _split(one: OneOp, token: tuple[str, int]) -> Combination | None:
    """A letter's split; None where an inner factor of a dim is split, for which placements have no word."""
    instance = one.instance
    given = [_place(dims, token) for dims in instance.operands]
    made = []
    for dims, sums in zip(instance.results, instance.sums, strict=True):
        made.append(f"P({sums[token]})" if token in sums else _place(dims, token))
    if None in given or None in made:
        return None
    return tuple(place or "" for place in given), tuple(place or "" for place in made)


def _place(dims: Dims, token: tuple[str, int]) -> str | None:
    for dim, row in enumerate(dims):
        if token in row:
            return f"S({dim})" if row[0] == token else None
    return "R"
