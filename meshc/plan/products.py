"""Mesh axes for an entry of two factors, one axis for each: `cp: heads*seq@attention > seq` splits heads first, and then seq.

    cp: heads*seq@attention > seq       8 ranks, 4 heads        becomes on 4 ranks     cp_heads: heads@attention > seq
                                                                and on 2               cp_seq: seq@attention > seq

The first factor takes as many ranks as divide both the axis and every dim of that name in the model; the second takes the rest. The first
factor's axis is the inner one: its ranks are consecutive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from meshc.errors import PlanError
from meshc.ir.mesh import Axis
from meshc.plan.entries import AxisEntry, FactorTerm
from meshc.plan.plan import Plan


def taken_apart(plan: Plan) -> list[tuple[AxisEntry, FactorTerm]]:
    """The entries that split their axis in two, each with its term with ``rest``. Raises PlanError for an entry with two such terms."""
    found = []
    for entry in plan.axes:
        terms = [term for term in entry.terms if term.rest is not None]
        if len(terms) > 1:
            raise PlanError(f"{entry.where}: {terms[0]} and {terms[1]} both take {entry.axis} apart; keep one of them")
        found += [(entry, term) for term in terms]
    return found


def parts_of(entry: AxisEntry, term: FactorTerm, ranks: int, sizes: Iterable[int]) -> tuple[Axis, ...]:
    """The axes that replace an axis of `ranks` ranks, major to minor; the axis itself if one of the two factors takes all ranks. `sizes`:
    sizes of all dims named like the first factor."""
    first = gcd(ranks, *sizes)
    if first in (1, ranks):
        return (Axis(entry.axis, ranks),)
    return Axis(f"{entry.axis}_{term.rest}", ranks // first), Axis(f"{entry.axis}_{term.factor}", first)


def factor_of(term: FactorTerm, ranks: int, sizes: Iterable[int]) -> str:
    """The factor that takes all ranks of an axis that is not split."""
    assert term.rest is not None
    return term.factor if gcd(ranks, *sizes) == ranks else term.rest


def keep_one_factor(entry: AxisEntry, factor: str) -> AxisEntry:
    """The entry with its two-factor term reduced to this factor."""
    ways = (tuple(term if term.rest is None else FactorTerm(factor, term.region) for term in rank) for rank in entry.ranks)
    return replace(entry, ranks=tuple(ways))
