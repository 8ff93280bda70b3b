"""Split of an axis by its entry: `cp: heads*seq@attention > seq` is two axes, one for each factor.

    cp: heads*seq@attention > seq       8 ranks, 4 heads        becomes on 4 ranks     cp_heads: heads@attention > seq
                                                                and on 2               cp_seq: seq@attention > seq

The first factor goes as far as it goes evenly: as many ranks as divide both the axis and every dim that the model calls so. The rest is the
second's. The axis of the first is the inner one: its ranks follow each other.
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
    """The entries that take their axis apart, each with the term that says so. Raises PlanError for an entry with two of them."""
    found = []
    for entry in plan.axes:
        terms = [term for term in entry.terms if term.rest is not None]
        if len(terms) > 1:
            raise PlanError(f"{entry.where}: {terms[0]} and {terms[1]} both take {entry.axis} apart; keep one of them")
        found += [(entry, term) for term in terms]
    return found


def parts_of(entry: AxisEntry, term: FactorTerm, ranks: int, sizes: Iterable[int]) -> tuple[Axis, ...]:
    """The axes that stand for one of so many ranks, major to minor. `sizes`: of all dims that are called as the first factor is. One axis,
    with its name, where one of the two factors takes all ranks."""
    first = gcd(ranks, *sizes)
    if first in (1, ranks):
        return (Axis(entry.axis, ranks),)
    return Axis(f"{entry.axis}_{term.rest}", ranks // first), Axis(f"{entry.axis}_{term.factor}", first)


def factor_of(term: FactorTerm, ranks: int, sizes: Iterable[int]) -> str:
    """Which factor takes all ranks of an axis that is one."""
    assert term.rest is not None
    return term.factor if gcd(ranks, *sizes) == ranks else term.rest


def keep_one_factor(entry: AxisEntry, factor: str) -> AxisEntry:
    """The entry, of whose term with two factors this one is left."""
    ways = (tuple(term if term.rest is None else FactorTerm(factor, term.region) for term in rank) for rank in entry.ranks)
    return replace(entry, ranks=tuple(ways))
