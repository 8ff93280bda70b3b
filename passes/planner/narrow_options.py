"""Options that a best choice may have: the lower bound rises, the best known cost falls, options above it are dropped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshc.passes.planner.cost_model import Pick
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.dual_ascent import DualAscent, Edge
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.relaxation import SHARE, Charges, ProgramColumns
from meshc.passes.planner.search_space import Floats, Numbers
from meshc.passes.planner.unique_numbers import membership_mask

ROUNDS: Final = 12
SWEEPS: Final = 4
"""Of each round."""
STALLED: Final = 0.1
"""Sweeps alone go on while a round takes more than this part of the gap."""
CLOSE: Final = 1e-6
"""A gap of this part of the seconds is none."""
PAIRS: Final = 10_000
"""A linear program is over so many pairs of forms: those that cost least, or all that are left."""
LED: Final = 16
"""Linear programs at most."""
AFTER: Final = 12
"""Sweeps after each at most: where a program has moved the messages, sweeps move them on, while one takes"""
WORTH: Final = 2e-3
"""this part of the gap."""
REACH: Final = 0.4
"""So far, of what the dearest of its pairs costs beyond the bound, a program leads at first"""
SHORTEST: Final = 0.01
"""(or of the gap, where that costs next to nothing);"""
WIDER: Final = 1.6
"""so many times as far next where the bound has come to more than"""
GOOD: Final = 1.2
"""this part of what the program promised (sweeps may come to more), and"""
NARROWER: Final = 0.5
"""so many times where it has not come to"""
POOR: Final = 0.6
"""this part."""
ENOUGH: Final = 1e-2
"""Where the gap is this part of the seconds, so many more programs may close it:"""
MORE: Final = 1
CROSSED: Final = 6
"""Branch and bound looks for a choice among so many of those that are known and"""
FEW: Final = 10_000
"""pairs that cost least; where these choices are the same as before, from then on among"""
MANY: Final = 20_000
"""so many (among forty thousand it takes minutes), until it is so near to the best of them:"""
NEAR: Final = 1e-3
GOAL: Final = 1e-2
"""It is asked for a bound only where the gap is more than this part of the seconds, and over"""
BOUNDED: Final = 10_000
"""pairs at most: over more it takes minutes."""
MARGIN: Final = 1e-9
"""Of the seconds: what sums of floating-point numbers are off by, and more."""


@dataclass(frozen=True)
class NarrowedModel:
    """
    pick    the best choice that is known, of so many weighed seconds;  bound  no choice has fewer
    ascent  with the options that a better choice may have;  whole  with all
    """

    pick: Pick
    seconds: float
    bound: float
    ascent: DualAscent
    whole: DualAscent

    @property
    def gap(self) -> float:
        """The part of the seconds that a better choice could save at most."""
        return (self.seconds - self.bound) / abs(self.seconds) if self.seconds else 0.0

    def with_choices(self, picks: Mapping[Pick, float]) -> NarrowedModel:
        """With other choices and their weighed seconds, if one of them is better."""
        best = min(((seconds, pick) for pick, seconds in picks.items()), default=(np.inf, self.pick))
        return replace(self, pick=best[1], seconds=best[0], bound=min(self.bound, best[0])) if best[0] < self.seconds else self

    def raise_bound(self, bound: float) -> NarrowedModel:
        return replace(self, bound=max(self.bound, min(self.seconds, bound)))

    def with_messages(self, ascent: DualAscent) -> NarrowedModel:
        """With messages of a higher bound, and without what they mark."""
        left = [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)]
        return replace(self, ascent=DualAscent(ascent.weighed, left, ascent)).raise_bound(ascent.lower_bound)


def narrow_options(
    weighed: Lagrangian, left: Sequence[Numbers], known: Iterable[Pick] = (), begun: NarrowedModel | None = None
) -> NarrowedModel:
    """From choices that are known, if any are; with `begun` from the choice and the messages that another objective has led to."""
    picks = {pick: weighed.seconds(pick) for pick in (*known, *([] if begun is None else [begun.pick]))}
    whole = ascent = DualAscent(weighed, left, None if begun is None else begun.whole)
    bound = -np.inf
    for _ in range(ROUNDS):
        for _ in range(SWEEPS):
            ascent.sweep(min(picks.values(), default=np.inf) * (1 + MARGIN))
        picks |= {pick: weighed.seconds(pick) for pick in decode_choices(ascent)}
        best = min(picks.values())
        before, bound = bound, max(bound, min(best, ascent.lower_bound))
        if bound - before < STALLED * (best - before) or best - bound <= CLOSE * abs(best) or count_pairs(ascent, best) <= PAIRS:
            break
        ascent = DualAscent(weighed, [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)], ascent)
    pick = min(picks, key=lambda one: (picks[one], one))
    return NarrowedModel(pick, picks[pick], bound, ascent, whole)


def decode_choices(ascent: DualAscent, picks: Iterable[Pick] = ()) -> list[Pick]:
    """The choice that the messages say, and it and others made better."""
    descent = Descent(ascent)
    said = descent.decide()
    return [said, *(descent.improve(one) for one in (said, *picks))]


def close_gap(found: NarrowedModel) -> NarrowedModel:
    """With what linear programs, and branch and bound, say of the options that are left. Programs over some of them lead the messages, and
    with these more options are dropped, until one is over all that is left."""
    weighed, reach, everything, enough, known = found.ascent.weighed, REACH, False, 0, {found.pick: found.seconds}
    crossed: list[set[int]] = []
    few = FEW
    for _ in range(LED):
        if found.gap <= CLOSE or enough > MORE:
            break
        columns, everything = _build_program(found, reach)
        relaxed = columns.solve_relaxation()
        if relaxed is None:
            break  # it has an answer, but none was come to
        found = found.with_choices(_note(known, _improve_choices(found.ascent, [columns.round_shares(relaxed.shares)]), weighed))
        if not relaxed.is_integral:
            kept = options_by_class(sorted(known, key=lambda one: (known[one], one))[:CROSSED], found.ascent)
            more = MANY if kept == crossed else few
            if kept != crossed or more > few:
                found = found.with_choices(_note(known, _branch_among_choices(found, kept, more), weighed))
            crossed, few = kept, more
        if everything:
            found = found.raise_bound(relaxed.bound)
            break
        ascent = guide_messages(found.ascent, relaxed.charges)
        _sweep_while_rising(ascent, found.seconds)
        found = found.with_choices(_note(known, decode_choices(ascent), weighed))
        rose = (ascent.lower_bound - found.ascent.lower_bound) / max(relaxed.bound - found.ascent.lower_bound, MARGIN * found.seconds)
        reach *= WIDER if rose > GOOD else NARROWER if rose < POOR else 1.0
        found = found.with_messages(ascent) if rose > 0 else found
        enough += found.gap <= ENOUGH
    return _bound_by_branching(found) if found.gap > GOAL else found


def _sweep_while_rising(ascent: DualAscent, known: float) -> None:
    """Sweeps, while one takes enough."""
    for _ in range(AFTER):
        before = ascent.lower_bound
        ascent.sweep(known * (1 + MARGIN))
        if ascent.lower_bound - before < WORTH * (known - ascent.lower_bound):
            break


def _note(known: dict[Pick, float], picks: Iterable[Pick], weighed: Lagrangian) -> dict[Pick, float]:
    """Choices with their weighed seconds, which are known from now on."""
    known |= {pick: weighed.seconds(pick) for pick in picks if pick not in known}
    return known


def _improve_choices(ascent: DualAscent, picks: Sequence[Pick]) -> list[Pick]:
    """They, and what comes of each a class at a time."""
    descent = Descent(ascent)
    return [*picks, *map(descent.improve, picks)]


def _build_program(found: NarrowedModel, reach: float) -> tuple[ProgramColumns, bool]:
    """Over all that is left, if that is not too much."""
    return columns_of(found.ascent, found.seconds, options_by_class([found.pick], found.ascent), most=PAIRS, reach=reach)


def _branch_among_choices(found: NarrowedModel, kept: Sequence[Collection[int]], most: int) -> list[Pick]:
    """A choice by branch and bound among what is kept and what costs least."""
    few, _ = columns_of(found.ascent, found.seconds, kept, most=most)
    pick, _ = few.solve_integer(gap=NEAR)
    return [] if pick is None else _improve_choices(found.ascent, [pick])


def _bound_by_branching(found: NarrowedModel) -> NarrowedModel:
    """With a bound by branch and bound over all that is left, if that is not too much."""
    columns, everything = columns_of(found.ascent, found.seconds, options_by_class([found.pick], found.ascent), most=BOUNDED)
    if not everything:
        return found
    pick, least = columns.solve_integer()
    seconds = {} if pick is None else {pick: found.ascent.weighed.seconds(pick)}
    return found.with_choices(seconds).raise_bound(-np.inf if least is None else least)


def mixed_options(columns: ProgramColumns, shares: Sequence[Floats], kept: Sequence[Collection[int]]) -> list[set[int]]:
    """What is kept of each class, and what a relaxation takes some of."""
    return [{*row[share > SHARE].tolist(), *of_class} for row, share, of_class in zip(columns.left, shares, kept, strict=True)]


def columns_of(
    ascent: DualAscent, known: float, kept: Sequence[Collection[int]], moments: Sequence[int] = (), budget: float = np.inf, *, most: int,
    reach: float = np.inf,
) -> tuple[ProgramColumns, bool]:  # fmt: skip
    """The options, and pairs of forms, of choices that cost no more than what is known, and whether that is all of them. Where there are
    more than `most`, those that cost least beyond the bound, and with any pairs between them those that are kept of each class; their
    charges are then within `reach` of the messages, in parts of what the dearest costs beyond the bound."""
    limit, beyond = known * (1 + MARGIN) - ascent.lower_bound, ascent.pairs()
    each = np.concatenate([one.ravel() for one in beyond.values()] or [np.zeros(0)])
    all_of_them = int((each <= limit).sum()) <= most
    if not all_of_them:
        limit = float(np.partition(each, most)[most])
    groups, own = ascent.weighed.model.groups, ascent.weighed.own
    chosen = [
        membership_mask(len(costs), np.array(sorted(of_class), dtype=np.intp))[row]
        for costs, row, of_class in zip(own, ascent.left, kept, strict=True)
    ]  # fmt: skip
    whole = [row[of_class] for row, of_class in zip(ascent.left, chosen, strict=True)]
    left = [row[of_class | (costs <= limit)] for row, of_class, costs in zip(ascent.left, chosen, ascent.beyond(), strict=True)]
    pairs: dict[tuple[int, int], NDArray[np.bool_]] = {}
    for edge in ascent.edges:
        group = groups[edge.group]
        ends = ((edge.maker, group.given, len(group.lies)), (edge.reader, group.legs[edge.leg].forms, len(group.wants)))
        allowed = beyond[edge.group, edge.leg] <= limit
        allowed[np.ix_(*(membership_mask(count, forms[whole[side.number]])[side.forms] for side, forms, count in ends))] = True
        pairs[edge.group, edge.leg] = allowed[
            np.ix_(*(membership_mask(count, forms[left[side.number]])[side.forms] for side, forms, count in ends))
        ]
    near = {} if all_of_them or reach == np.inf else charges(ascent)
    far = reach * max(limit, SHORTEST * (known - ascent.lower_bound))
    return ProgramColumns(ascent.weighed.model, ascent.weighed.memory, left, pairs, moments, budget, near, far), all_of_them


def options_by_class(picks: Iterable[Pick], ascent: DualAscent) -> list[set[int]]:
    """The options of each class that some pick takes."""
    found: list[set[int]] = [set() for _ in ascent.left]
    for pick in picks:
        for of_class, option in zip(found, pick, strict=True):
            of_class.add(option)
    return found


def count_pairs(ascent: DualAscent, known: float) -> int:
    limit = known * (1 + MARGIN) - ascent.lower_bound
    return sum(int((one <= limit).sum()) for one in ascent.pairs().values())


# Messages restarted from the dual values of a linear program, where sweeps have stalled.
#
#     sweep              ___----''''          each class by itself: it stalls where several would have to move together
#     linear program             |           over the pairs that cost least, its charges no farther from the messages than so far
#     messages                   |           where they charge more than a pair that it did not know has room for, that is taken back
#     sweep                      ___---''    and so on
#
# A program's rows charge a leg for each form that is given and for each that is wanted, as messages do: over all pairs these are messages
# of the highest bound that there is. Over some of them it knows nothing of the others, and would lead anywhere; so its charges stay near
# the messages, and what it promises is a bound somewhat lower (the boxstep method: Marsten, Hogan, Blankenship, Operations Research 23(3),
# 1975). The pairs that were in the way are among those that cost least afterwards, and the next program knows them (column generation).


def charges(ascent: DualAscent) -> dict[tuple[int, int], Charges]:
    """What its legs charge, by group and leg."""
    found: dict[tuple[int, int], Charges] = {}
    for edge in ascent.edges:
        found[edge.group, edge.leg] = Charges(edge.maker.forms, edge.maker.message, edge.reader.forms, edge.reader.message)
    return found


def guide_messages(ascent: DualAscent, said: Mapping[tuple[int, int], Charges]) -> DualAscent:
    """Messages over the options of an ascent that charge what a linear program over some of them says, by group and leg."""
    found = ascent.without_messages()
    for edge, was in zip(found.edges, ascent.edges, strict=True):
        _charge(found, edge, was, said.get((edge.group, edge.leg)))
    for edge, was in zip(found.edges, ascent.edges, strict=True):
        _fill(found, edge, was)
    found.settle()
    return found


def _charge(found: DualAscent, edge: Edge, was: Edge, charges: Charges | None) -> None:
    """What the program says of the forms that it knows, the reader's as far as there is room; of others nothing is taken yet."""
    if charges is None:
        edge.maker.message, edge.reader.message = was.maker.message, was.reader.message
    else:
        edge.maker.message = _charges_by_form(edge.maker.forms, charges.given, charges.maker)
        edge.reader.message = _charges_by_form(edge.reader.forms, charges.wanted, charges.reader)
    edge.reader.message = np.minimum(edge.reader.message, (found.room(edge) - edge.maker.message[:, None]).min(axis=0))
    found.take(edge)


def _fill(found: DualAscent, edge: Edge, was: Edge) -> None:
    """Forms that the program does not know keep what they were charged as far as there is room."""
    unknown = np.isinf(edge.maker.message)
    if unknown.any():
        left = np.minimum(was.maker.message, (found.room(edge) - edge.reader.message).min(axis=1))
        edge.maker.message = np.where(unknown, left, edge.maker.message)
        found.take(edge)
    unknown = np.isinf(edge.reader.message)
    if unknown.any():
        left = np.minimum(was.reader.message, (found.room(edge) - edge.maker.message[:, None]).min(axis=0))
        edge.reader.message = np.where(unknown, left, edge.reader.message)
        found.take(edge)


def _charges_by_form(forms: Numbers, known: Numbers, charged: Floats) -> Floats:
    """By form; of one that is not known, less than anything."""
    place = np.minimum(np.searchsorted(known, forms), len(known) - 1)
    return np.where(known[place] == forms, charged[place], -np.inf)
