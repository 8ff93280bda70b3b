"""Narrowed search: options that a best choice may have, the best known choice and a lower bound, by sweeps and linear programs.

    sweep              one class at a time: stalls where several would have to change together
    linear program     over the pairs of forms of least cost, its charges near the messages
    messages           these charges, less where they exceed the price of a pair outside the program
    sweep              and so on

The lower bound rises, the best known cost falls, and options under which the bound exceeds it are dropped. Charges, the duals of a
program's rows, are messages; over all pairs they are those of the highest bound. A program over some pairs does not know the others, so its
charges stay near the messages, at the price of a somewhat lower bound (the boxstep method: Marsten, Hogan, Blankenship, Operations Research
23(3), 1975); pairs that limited the messages are then among those of least cost and in the next program (column generation).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshc.passes.planner.cost_model import Pick
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.dual_ascent import Charges, DualAscent
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.linear_program import EXACT
from meshc.passes.planner.relaxation import ENOUGH, ProgramColumns
from meshc.passes.planner.search_space import MARGIN, Floats, Numbers

ROUNDS: Final = 12
"""Most rounds of sweeps, most linear programs after them, and most sweeps after each program. (Four sweeps after a program take 0.6 of what
twelve take of CLIP's gap on three axes.)"""
SWEEPS: Final = 4
"""Sweeps of each round, between which choices are decoded and options dropped; of each new price of bytes
likewise. (Eight: as RISE of 64 does in `budget_search.py`, in the same seconds.)"""
STALLED: Final = 0.1
"""Part of the gap that a round must take for another to follow. (With 0.005 CLIP on three axes takes as long, and keeps a gap of 0.81 % in
place of 0.71.)"""
PAIRS: Final = 10_000
"""Most pairs of forms in a linear program, or in branch and bound: those of least cost, or all that are left. (For branch and bound of CLIP
on three axes twenty thousand found nothing better.)"""
REACH: Final = 0.4
"""Distance from the messages that the first program's charges may have, in parts of the gap. (With a tenth, a choice for
SigLIP on three axes is 0.7 % slower.)"""
BEST: Final = 6
"""Best known choices that count: those with options open to branch and bound, and those that a search within a budget returns. (CLIP on
three axes is 0.4 % slower with three; with twelve, 0.06 % faster in twice the seconds. Within budgets one makes Mixtral 0.2 % slower.)"""


@dataclass(frozen=True)
class NarrowedModel:
    """
    pick    best known choice;  seconds  its weighted seconds;  bound  lower bound on those of any choice
    ascent  over the options that a better choice may have;  whole  over all options
    """

    pick: Pick
    seconds: float
    bound: float
    ascent: DualAscent
    whole: DualAscent

    @property
    def gap(self) -> float:
        """Largest part of the seconds that a better choice could save."""
        return (self.seconds - self.bound) / abs(self.seconds) if self.seconds else 0.0

    def with_choices(self, picks: Mapping[Pick, float]) -> NarrowedModel:
        """With the best of `picks`, choices with their weighted seconds, if better than `pick`."""
        best = min(((seconds, pick) for pick, seconds in picks.items()), default=(np.inf, self.pick))
        return replace(self, pick=best[1], seconds=best[0], bound=min(self.bound, best[0])) if best[0] < self.seconds else self

    def raise_bound(self, bound: float) -> NarrowedModel:
        return replace(self, bound=max(self.bound, min(self.seconds, bound)))

    def with_messages(self, ascent: DualAscent) -> NarrowedModel:
        """With the messages and bound of `ascent`, without the options that its sweeps ruled out."""
        left = [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)]
        return replace(self, ascent=DualAscent(ascent.weighed, left, ascent)).raise_bound(ascent.lower_bound)


def narrow_options(
    weighed: Lagrangian, left: Sequence[Numbers], known: Iterable[Pick] = (), begun: NarrowedModel | None = None
) -> NarrowedModel:
    """Sweeps from the choices `known`, if any; with `begun`, from the choice and messages of a search with another objective."""
    picks = {pick: weighed.seconds(pick) for pick in (*known, *([] if begun is None else [begun.pick]))}
    whole = ascent = DualAscent(weighed, left, None if begun is None else begun.whole)
    bound = -np.inf
    for _ in range(ROUNDS):
        for _ in range(SWEEPS):
            ascent.sweep(min(picks.values(), default=np.inf) * (1 + MARGIN))
        picks |= {pick: weighed.seconds(pick) for pick in decode_choices(ascent)}
        best = min(picks.values())
        before, bound = bound, max(bound, min(best, ascent.lower_bound))
        if bound - before < STALLED * (best - before) or best - bound <= EXACT * abs(best) or count_pairs(ascent, best) <= PAIRS:
            break
        ascent = DualAscent(weighed, [row[keep] for row, keep in zip(ascent.left, ascent.keep, strict=True)], ascent)
    pick = min(picks, key=lambda one: (picks[one], one))
    return NarrowedModel(pick, picks[pick], bound, ascent, whole)


def decode_choices(ascent: DualAscent, picks: Iterable[Pick] = ()) -> list[Pick]:
    """The choice decoded from messages, then this choice and `picks` improved by descent."""
    descent = Descent(ascent.weighed, ascent.left, ascent.edges)
    said = descent.decide()
    return [said, *(descent.improve(one) for one in (said, *picks))]


def close_gap(found: NarrowedModel) -> NarrowedModel:
    """`found` with a smaller gap, by linear programs and branch and bound over the options left. Programs over some pairs guide the
    messages, which rule out more options, until a program is over all pairs left."""
    weighed, reach, known = found.ascent.weighed, REACH, {found.pick: found.seconds}
    crossed: list[set[int]] = []
    for _ in range(ROUNDS):
        if found.gap <= EXACT:
            break
        last = found.gap <= ENOUGH
        columns, everything = columns_of(found.ascent, found.seconds, options_by_class([found.pick], found.ascent), most=PAIRS, reach=reach)
        relaxed = columns.solve_relaxation()
        if relaxed is None:
            break  # there is an answer, but no method found it
        found = found.with_choices(_note(known, _improve_choices(found.ascent, [columns.round_shares(relaxed.shares)]), weighed))
        bound = relaxed.bound if everything else -np.inf
        if not relaxed.is_integral:
            kept = options_by_class(sorted(known, key=lambda one: (known[one], one))[:BEST], found.ascent)
            if kept != crossed:
                picks, least = _branch_among_choices(found, kept)
                found, bound = found.with_choices(_note(known, picks, weighed)), max(bound, least)
            crossed = kept
        found = found.raise_bound(bound)
        if everything or last:
            break
        ascent = guide_messages(found.ascent, relaxed.charges)
        _sweep_while_rising(ascent, found.seconds)
        found = found.with_choices(_note(known, decode_choices(ascent), weighed))
        rose = (ascent.lower_bound - found.ascent.lower_bound) / max(relaxed.bound - found.ascent.lower_bound, MARGIN * found.seconds)
        # T5 and CLIP on three axes are 1 % slower where the reach stays, in up to twice the seconds; 0.4 and 0.2 % with 4 and 1/4, 0.05 and
        # 0.2 % with 1.4 and 0.7
        reach *= 2.0 if rose > 1.0 else 0.5
        found = found.with_messages(ascent) if rose > 0 else found
    return found


def _sweep_while_rising(ascent: DualAscent, known: float) -> None:
    """Sweeps while each takes enough of the gap."""
    for _ in range(ROUNDS):
        before = ascent.lower_bound
        ascent.sweep(known * (1 + MARGIN))
        if ascent.lower_bound - before < ENOUGH * (known - ascent.lower_bound):
            break


def _note(known: dict[Pick, float], picks: Iterable[Pick], weighed: Lagrangian) -> dict[Pick, float]:
    """`known` with `picks` and their weighted seconds, added in place."""
    known |= {pick: weighed.seconds(pick) for pick in picks if pick not in known}
    return known


def _improve_choices(ascent: DualAscent, picks: Sequence[Pick]) -> list[Pick]:
    """`picks`, and each of them improved by descent."""
    descent = Descent(ascent.weighed, ascent.left)
    return [*picks, *map(descent.improve, picks)]


def _branch_among_choices(found: NarrowedModel, kept: Sequence[Collection[int]]) -> tuple[list[Pick], float]:
    """The choice, and the same improved, of branch and bound over options `kept` and pairs of least cost, none if it finds none; and a
    lower bound if these are all pairs left, else -inf."""
    columns, everything = columns_of(found.ascent, found.seconds, kept, most=PAIRS)
    pick, least = columns.solve_integer()
    return [] if pick is None else _improve_choices(found.ascent, [pick]), least if everything and least is not None else -np.inf


def mixed_options(columns: ProgramColumns, shares: Sequence[Floats], kept: Sequence[Collection[int]]) -> list[set[int]]:
    """By class: options in `kept`, and those of which a relaxation takes a share."""
    return [{*row[share > EXACT].tolist(), *of_class} for row, share, of_class in zip(columns.left, shares, kept, strict=True)]


def columns_of(
    ascent: DualAscent, known: float, kept: Sequence[Collection[int]], moments: Sequence[int] = (), budget: float = np.inf, *, most: int,
    reach: float = np.inf,
) -> tuple[ProgramColumns, bool]:  # fmt: skip
    """Program over options and pairs of forms of choices that cost at most `known`, and whether these are all of them. Of more than `most`
    pairs: those of least excess over the bound, and all pairs between options in `kept`; charges are then within `reach` of the messages,
    in parts of the gap."""
    limit, beyond = known * (1 + MARGIN) - ascent.lower_bound, ascent.pairs()
    each = np.concatenate([one.ravel() for one in beyond.values()] or [np.zeros(0)])
    all_of_them = int((each <= limit).sum()) <= most
    if not all_of_them:
        limit = float(np.partition(each, most)[most])
    groups = ascent.weighed.model.groups
    chosen = [np.isin(row, [*of_class]) for row, of_class in zip(ascent.left, kept, strict=True)]
    whole = [row[of_class] for row, of_class in zip(ascent.left, chosen, strict=True)]
    left = [row[of_class | (costs <= limit)] for row, of_class, costs in zip(ascent.left, chosen, ascent.beyond(), strict=True)]
    pairs: dict[tuple[int, int], NDArray[np.bool_]] = {}
    for edge in ascent.edges:
        group = groups[edge.group]
        ends = ((edge.maker, group.given), (edge.reader, group.legs[edge.leg].forms))
        allowed = beyond[edge.group, edge.leg] <= limit
        allowed[np.ix_(*(np.isin(side.forms, forms[whole[side.number]]) for side, forms in ends))] = True
        pairs[edge.group, edge.leg] = allowed[np.ix_(*(np.isin(side.forms, forms[left[side.number]]) for side, forms in ends))]
    near, far = dict[tuple[int, int], Charges](), np.inf
    if not all_of_them and reach < np.inf:
        near, far = ascent.charges(), reach * (known - ascent.lower_bound)
    return ProgramColumns(ascent.weighed.model, ascent.weighed.memory, left, pairs, moments, budget, near, far), all_of_them


def options_by_class(picks: Iterable[Pick], ascent: DualAscent) -> list[set[int]]:
    """By class: options that some of `picks` take."""
    found: list[set[int]] = [set() for _ in ascent.left]
    for pick in picks:
        for of_class, option in zip(found, pick, strict=True):
            of_class.add(option)
    return found


def count_pairs(ascent: DualAscent, known: float) -> int:
    limit = known * (1 + MARGIN) - ascent.lower_bound
    return sum(int((one <= limit).sum()) for one in ascent.pairs().values())


# Messages restarted from the duals of a linear program, where sweeps have stalled.


def guide_messages(ascent: DualAscent, said: Mapping[tuple[int, int], Charges]) -> DualAscent:
    """Messages over the options of an ascent, from the charges of a linear program over some of them, by group and leg. Forms outside the
    program have those before it, as far as there is room."""
    found = DualAscent(ascent.weighed, ascent.left)
    found.resume({**ascent.charges(), **said}, -np.inf)
    for edge, was in zip(found.edges, ascent.edges, strict=True):
        for side, before in zip(edge.sides, was.sides, strict=True):
            unknown = np.isinf(side.message)
            if unknown.any():
                side.message = np.where(unknown, np.minimum(before.message, found.room_for(edge, side)), side.message)
                found.take(edge)
    found.settle()
    return found
