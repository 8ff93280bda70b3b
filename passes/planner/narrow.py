"""The options of a weighed model that a best choice may have: the bound rises, the best choice known falls, what lies above it goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshc.passes.planner.ascent import Ascent
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.model import Pick
from meshc.passes.planner.solve import Columns
from meshc.passes.planner.space import Numbers
from meshc.passes.planner.weighed import Weighed

ROUNDS: Final = 12
SWEEPS: Final = 4
"""Of each round."""
CLOSE: Final = 1e-6
"""A gap of this part of the seconds is none."""
PROGRAMS: Final = (10_000, 40_000)
"""Linear programs, each over so many pairs of forms at most."""
MARGIN: Final = 1e-9
"""Of the seconds: what sums of floating-point numbers are off by, and more."""


@dataclass(frozen=True)
class Narrowed:
    """
    pick    the best choice that is known, of so many weighed seconds;  bound  no choice has fewer
    ascent  with the options that a better choice may have;  whole  with all
    """

    pick: Pick
    seconds: float
    bound: float
    ascent: Ascent
    whole: Ascent


def narrow(weighed: Weighed, left: Sequence[Numbers], known: Iterable[Pick] = ()) -> Narrowed:
    """From choices that are known, if any are."""
    picks = {pick: weighed.seconds(pick) for pick in known}
    whole = ascent = Ascent(weighed, left)
    bound = -np.inf
    for _ in range(ROUNDS):
        for _ in range(SWEEPS):
            ascent.sweep(min(picks.values(), default=np.inf) * (1 + MARGIN))
        picks |= {pick: weighed.seconds(pick) for pick in decoded(ascent)}
        best = min(picks.values())
        bound = max(bound, min(best, ascent.bound))
        if best - bound <= CLOSE * abs(best) or count_pairs(ascent, best) <= PROGRAMS[0]:
            break
        ascent = Ascent(weighed, [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)], ascent)
    pick = min(picks, key=lambda one: (picks[one], one))
    return Narrowed(pick, picks[pick], bound, ascent, whole)


def decoded(ascent: Ascent, picks: Iterable[Pick] = ()) -> list[Pick]:
    """The choice that the messages say, and it and others made better."""
    descent = Descent(ascent)
    said = descent.decided()
    return [said, *(descent.improved(one) for one in (said, *picks))]


def closed(found: Narrowed) -> Narrowed:
    """With what linear programs, and branch and bound, say of the options that are left."""
    weighed = found.ascent.weighed
    for most in PROGRAMS:
        if found.seconds - found.bound <= CLOSE * abs(found.seconds):
            break
        columns, everything = columns_of(found.ascent, found.seconds, [found.pick], most=most)
        relaxed = columns.relaxed()
        assert relaxed is not None, "a search without a budget has an answer"
        pick, bound = columns.rounded(relaxed.shares), relaxed.bound
        if not relaxed.whole:
            better, least = columns.whole()
            pick, bound = better or pick, max(bound, least or bound)
        seconds = weighed.seconds(pick)
        if seconds >= found.seconds:
            pick, seconds = found.pick, found.seconds
        found = replace(found, pick=pick, seconds=seconds, bound=max(found.bound, min(seconds, bound)) if everything else found.bound)
        if everything:
            break
    return found


def columns_of(
    ascent: Ascent, known: float, picks: Sequence[Pick], moments: Sequence[int] = (), budget: float = np.inf, *, most: int
) -> tuple[Columns, bool]:
    """The options, and pairs of forms, of choices that cost no more than what is known, and whether that is all of them. Where there are
    more than `most`, those that cost least beyond the bound, and those of the picks that are of these options."""
    limit = known * (1 + MARGIN) - ascent.bound
    beyond = np.concatenate([one.ravel() for one in ascent.pairs().values()] or [np.zeros(0)])
    all_of_them = int((beyond <= limit).sum()) <= most
    if not all_of_them:
        limit = float(np.partition(beyond, most)[most])
    picks = [pick for pick in picks if all(option in row for option, row in zip(pick, ascent.left, strict=True))]
    left = []
    for number, (row, costs) in enumerate(zip(ascent.left, ascent.beyond(), strict=True)):
        taken = np.isin(row, [pick[number] for pick in picks])
        left.append(row[taken | (costs <= limit)])
    inner = Ascent(ascent.weighed, left, ascent)
    pairs = {key: one <= limit for key, one in inner.pairs().items()}
    for edge in inner.edges:
        group = ascent.weighed.model.groups[edge.group]
        leg = group.legs[edge.leg]
        for pick in picks:
            a = np.searchsorted(edge.maker.forms, group.given[pick[group.maker]])
            b = np.searchsorted(edge.reader.forms, leg.forms[pick[leg.reader]])
            pairs[edge.group, edge.leg][a, b] = True
    return Columns(ascent.weighed.model, ascent.weighed.memory, left, pairs, moments, budget), all_of_them


def count_pairs(ascent: Ascent, known: float) -> int:
    limit = known * (1 + MARGIN) - ascent.bound
    return sum(int((one <= limit).sum()) for one in ascent.pairs().values())
