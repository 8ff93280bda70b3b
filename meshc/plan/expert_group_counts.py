"""Number of groups in which a module's routed experts are traced: ranks along the axes that split them.

    ep: experts > batch                                   one group per rank of ep
    dp: experts@model.layers.[0-3].mlp.experts > batch    in these layers one group per rank of dp
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Final

from meshc.plan.entries import FactorTerm
from meshc.plan.plan import Plan

EXPERTS: Final = "experts"


def groups_of(plan: Plan, sizes: Mapping[str, int], path: str) -> int:
    """Number of groups of the experts at this path; 1 if no axis splits them."""
    return prod(sizes[entry.axis] for entry in plan.axes if any(_splits(term, path) for term in entry.terms))


def splits(plan: Plan, sizes: Mapping[str, int]) -> tuple[tuple[int, tuple[str | None, ...]], ...]:
    """(size, regions) of each axis that splits experts: all that the numbers of groups depend on."""
    found = ((sizes[entry.axis], tuple(term.region for term in entry.terms if term.covers(EXPERTS))) for entry in plan.axes)
    return tuple((size, regions) for size, regions in found if size > 1 and regions)


def _splits(term: FactorTerm, path: str) -> bool:
    return term.covers(EXPERTS) and (term.region in (None, "products") or fnmatchcase(path, term.region or ""))
