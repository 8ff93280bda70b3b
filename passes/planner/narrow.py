"""The options of a weighed model that a best choice may have: the bound rises, the best choice known falls, what lies above it goes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from meshc.passes.planner.ascent import Ascent
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.model import Pick
from meshc.passes.planner.solve import SHARE, Columns
from meshc.passes.planner.space import Floats, Numbers
from meshc.passes.planner.weighed import Weighed

ROUNDS: Final = 12
SWEEPS: Final = 4
"""Of each round."""
AGAIN: Final = 16
"""Between linear programs that are not over all that is left."""
CLOSE: Final = 1e-6
"""A gap of this part of the seconds is none."""
PROGRAMS: Final = (10_000, 40_000)
"""Linear programs, each over so many pairs of forms at most."""
MORE: Final = 3
"""Of them, as large as the last and with sweeps between them, where they leave a gap of more than"""
GOAL: Final = 1e-2
"""this part of the seconds."""
CROSSED: Final = 10_000
"""Branch and bound is over so many pairs of forms at most, and what relaxations mix: over more it takes minutes."""
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


def narrow(weighed: Weighed, left: Sequence[Numbers], known: Iterable[Pick] = (), begun: Narrowed | None = None) -> Narrowed:
    """From choices that are known, if any are; with `begun` from the choice and the messages that another objective has led to."""
    picks = {pick: weighed.seconds(pick) for pick in (*known, *([] if begun is None else [begun.pick]))}
    whole = ascent = Ascent(weighed, left, None if begun is None else begun.whole)
    bound = -np.inf
    for _ in range(ROUNDS):
        for _ in range(SWEEPS):
            ascent.sweep(min(picks.values(), default=np.inf) * (1 + MARGIN))
        picks |= {pick: weighed.seconds(pick) for pick in decoded(ascent)}
        best = min(picks.values())
        bound = max(bound, min(best, ascent.bound))
        if best - bound <= CLOSE * abs(best) or count_pairs(ascent, best) <= PROGRAMS[-1]:
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
    for number, most in enumerate((*PROGRAMS, *PROGRAMS[-1:] * MORE)):
        if found.seconds - found.bound <= (GOAL if number >= len(PROGRAMS) else CLOSE) * abs(found.seconds):
            break
        columns, everything = columns_of(found.ascent, found.seconds, together([found.pick], found.ascent), most=most)
        relaxed = columns.relaxed()
        assert relaxed is not None, "a search without a budget has an answer"
        bound, picks = relaxed.bound, [columns.rounded(relaxed.shares), found.pick]
        if not relaxed.whole:
            kept = mixed(columns, relaxed.shares, together(picks, found.ascent))
            narrow, all_of_them = columns_of(found.ascent, found.seconds, kept, most=CROSSED)
            better, least = narrow.whole()
            picks = picks if better is None else [*picks, better]
            bound = max(bound, least or bound) if all_of_them and everything else bound
        pick = min(picks, key=weighed.seconds)
        seconds = weighed.seconds(pick)
        found = replace(found, pick=pick, seconds=seconds, bound=max(found.bound, min(seconds, bound)) if everything else found.bound)
        if everything:
            break
        found = swept(found, SWEEPS if number == 0 else AGAIN)
    return found


def mixed(columns: Columns, shares: Sequence[Floats], kept: Sequence[Collection[int]]) -> list[set[int]]:
    """What is kept of each class, and what a relaxation takes some of."""
    return [{*row[share > SHARE].tolist(), *of_class} for row, share, of_class in zip(columns.left, shares, kept, strict=True)]


def swept(found: Narrowed, sweeps: int) -> Narrowed:
    """With what is known by now."""
    ascent = found.ascent
    for _ in range(sweeps):
        ascent.sweep(found.seconds * (1 + MARGIN))
    ascent = Ascent(ascent.weighed, [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)], ascent)
    return replace(found, ascent=ascent, bound=max(found.bound, min(found.seconds, ascent.bound)))


def columns_of(
    ascent: Ascent, known: float, kept: Sequence[Collection[int]], moments: Sequence[int] = (), budget: float = np.inf, *, most: int
) -> tuple[Columns, bool]:
    """The options, and pairs of forms, of choices that cost no more than what is known, and whether that is all of them. Where there are
    more than `most`, those that cost least beyond the bound, and with any pairs between them those that are kept of each class."""
    limit = known * (1 + MARGIN) - ascent.bound
    beyond = np.concatenate([one.ravel() for one in ascent.pairs().values()] or [np.zeros(0)])
    all_of_them = int((beyond <= limit).sum()) <= most
    if not all_of_them:
        limit = float(np.partition(beyond, most)[most])
    whole = [row[np.isin(row, list(of_class))] for row, of_class in zip(ascent.left, kept, strict=True)]
    beyond_each = zip(ascent.left, whole, ascent.beyond(), strict=True)
    left = [row[np.isin(row, of_class) | (costs <= limit)] for row, of_class, costs in beyond_each]
    inner = Ascent(ascent.weighed, left, ascent)
    pairs = {key: one <= limit for key, one in inner.pairs().items()}
    for edge in inner.edges:
        group = ascent.weighed.model.groups[edge.group]
        given = np.isin(edge.maker.forms, group.given[whole[group.maker]])
        wanted = np.isin(edge.reader.forms, group.legs[edge.leg].forms[whole[edge.reader.number]])
        pairs[edge.group, edge.leg] |= given[:, None] & wanted
    return Columns(ascent.weighed.model, ascent.weighed.memory, left, pairs, moments, budget), all_of_them


def together(picks: Iterable[Pick], ascent: Ascent) -> list[set[int]]:
    """The options of each class that some pick takes."""
    found: list[set[int]] = [set() for _ in ascent.left]
    for pick in picks:
        for of_class, option in zip(found, pick, strict=True):
            of_class.add(option)
    return found


def count_pairs(ascent: Ascent, known: float) -> int:
    limit = known * (1 + MARGIN) - ascent.bound
    return sum(int((one <= limit).sum()) for one in ascent.pairs().values())
