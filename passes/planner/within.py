"""Choices within a memory budget, by Lagrangian prices of a byte at the fullest moments.

    price of a byte       0 ............... rises until what is cheapest fits ...... is narrowed down between what fits and what does not
    bound                 of the weighed model, less price * budget: the highest of all is kept
    options left          those with which the bound is below what the best choice that fits takes
    linear program        over these, with a row for each full moment: its prices of the rows give the next bound, its choice is a candidate

What is cheapest at a price is a choice that fits somewhat less, or more. Where several moments are full, each has a price of its own: those
at which the cheapest of the choices that are known is dearest (Kelley's cutting planes, J. SIAM 8(4), 1960).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.planner.ascent import Ascent
from meshc.passes.planner.least import Least
from meshc.passes.planner.linear import solved
from meshc.passes.planner.memory import Memory
from meshc.passes.planner.model import Model, Pick
from meshc.passes.planner.narrow import MARGIN, Narrowed, columns_of, decoded, mixed, together
from meshc.passes.planner.solve import BRANCHES, Allowance, Columns
from meshc.passes.planner.space import Floats
from meshc.passes.planner.weighed import Weighed
from meshc.report.tables import bytes_text

START: Final = 1e-13
"""Seconds that a byte costs at first: a gigabyte a tenth of a millisecond."""
RISE: Final = 16.0
HIGHEST: Final = 1e-3
"""The price rises so fast, and to so many seconds a byte: then nothing fits."""
PRICES: Final = 3
"""That are tried once something fits."""
SWEEPS: Final = 4
"""At each price."""
PROGRAMS: Final = (10_000, 10_000, 20_000, 40_000)
"""Linear programs, each over so many pairs of forms at most and at the prices that the one before it gave."""
MORE: Final = 6
"""Of them where nothing fits yet, each with the moment that was too full in the one before."""
FEW_NODES: Final = 20
"""Of branch and bound."""
CROSSED: Final = 4
"""So many of the best choices, and what relaxations mix, are open to branch and bound, beside"""
PAIRS: Final = 5_000
"""pairs of forms that cost least."""
CROSSINGS: Final = 2
"""Branch and bound at most in one search: a third time it takes as long, and has found nothing."""
ENOUGH: Final = 5e-3
"""A gap of this part of the seconds is looked into no further."""


@dataclass
class Within:
    """The search within one budget.

    bound    no choice within the budget takes fewer seconds
    allowed  what its programs may come to
    moments  that have a price
    picks    choices, with their seconds and the bytes at each position
    """

    model: Model
    memory: Memory
    budget: float
    ascent: Ascent
    bound: float
    allowed: Allowance
    moments: list[int] = field(default_factory=list)
    weights: Sequence[float] = ()
    """The prices of the highest bound."""
    fewest: float = 0.0
    """No choice holds fewer bytes."""
    crossed: set[tuple[int, ...]] = field(default_factory=set)
    """What branch and bound was asked: moments, rows and columns. A second time it finds little, unless it is over all that is left."""
    picks: dict[Pick, tuple[float, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mixed: list[set[int]] = [set() for _ in self.model.own]
        changes = sum(group.count * sum(float(leg.price.max()) for leg in group.legs) for group in self.model.groups)
        self.dearest_s = sum(float(own.max()) for own in self.model.own) + changes

    def note(self, pick: Pick) -> bool:
        """Whether it fits; the fullest moment of one that does not is one of those that have a price from now on."""
        if pick not in self.picks:
            self.picks[pick] = self.model.seconds(pick), self.memory.walk(pick)
        walked = self.picks[pick][1]
        fits = bool(walked.max() <= self.budget)
        moment = int(walked.argmax())
        if not fits and moment not in self.moments:
            self.moments.append(moment)
        return fits

    @property
    def fitting(self) -> Pick | None:
        """The best choice that fits."""
        found = [one for one, (_, walked) in self.picks.items() if walked.max() <= self.budget]
        return min(found, key=lambda one: (self.picks[one][0], one), default=None)

    @property
    def best(self) -> float:
        """Its seconds."""
        return np.inf if self.fitting is None else self.picks[self.fitting][0]

    @property
    def nothing(self) -> bool:
        """Whether no choice fits: each holds more, or the bound is above what the dearest of all takes."""
        return self.fewest * (1 - MARGIN) > self.budget or self.bound > self.dearest_s

    def near(self, bound: float, part: float) -> bool:
        """Whether the best choice that fits is so near to a bound."""
        return self.best < np.inf and self.best - bound <= part * self.best

    @property
    def close(self) -> bool:
        return self.near(self.bound, ENOUGH)

    def at(self, weights: Sequence[float]) -> bool:
        """The bound and choices at these prices; whether one of the choices is new."""
        weighed = Weighed(self.model, self.memory, dict(zip(self.moments, weights, strict=True)))
        left = self.ascent.left
        ascent = Ascent(weighed, left, self.ascent)
        owed = weighed.owed(self.budget)
        for _ in range(SWEEPS):
            ascent.sweep((self.best + owed) * (1 + MARGIN))
        if ascent.bound - owed > self.bound:
            self.weights = list(weights)
        self.bound = max(self.bound, min(ascent.bound - owed, self.best))
        self.ascent = ascent if all(keep.all() for keep in ascent.keep) else Ascent(
            weighed, [row[keep] for row, keep in zip(left, ascent.keep, strict=True)], ascent
        )
        known = len(self.picks)
        for pick in decoded(ascent, [] if self.fitting is None else [self.fitting]):
            self.note(pick)
        return len(self.picks) > known

    def rise(self) -> None:
        """Until something fits, or nothing does."""
        weight = START
        while self.best == np.inf and weight <= HIGHEST and not self.nothing:
            self.at([weight] * len(self.moments))
            weight *= RISE

    def narrow(self) -> None:
        """Prices at which the cheapest of the known choices is dearest, while that finds new ones and the bound is not there."""
        for _ in range(PRICES):
            weights, most = self.dearest()
            if self.close or most - self.bound <= ENOUGH * abs(most):
                break
            if not self.at(weights):
                break

    def dearest(self) -> tuple[list[float], float]:
        """Prices of the moments, and what the cheapest known choice costs at them, which is the most."""
        rows = [[*((self.budget - walked[self.moments]) * 1e-9), 1.0] for _, walked in self.picks.values()]
        seconds = [1e3 * one for one, _ in self.picks.values()]
        moments = len(self.moments)
        found = solved([*[0.0] * moments, -1.0], rows, seconds, bounds=[*[(0, None)] * moments, (None, None)])
        assert found is not None, "some choice costs most"
        return [float(one) * 1e-12 for one in found.x[:-1]], float(found.x[-1]) / 1e3

    def programs(self, sizes: tuple[int, ...] = PROGRAMS) -> None:
        """Linear programs over what costs least beyond the bound, the second over more and so on, until one is over all that is left, or
        there is no allowance for the next."""
        for tried, most in enumerate((*sizes, *sizes[-1:] * MORE)):
            if self.close or (tried >= len(sizes) and self.best < np.inf):
                return
            moments, known = len(self.moments), self.best + self.ascent.weighed.owed(self.budget)
            fitting = together([] if self.fitting is None else [self.fitting], self.ascent)
            columns, everything = columns_of(self.ascent, known, fitting, self.moments, self.budget, most=most)
            report_progress(f"a plan within {bytes_text(self.budget)}, linear program {tried + 1}")
            relaxed = columns.relaxed() if self.allowed.spend(columns) else None
            if relaxed is None:
                return
            bound = relaxed.bound
            self.note(columns.rounded(relaxed.shares))
            if not relaxed.whole and not self.near(bound, ENOUGH):
                least = self._cross(columns, relaxed.shares)
                bound = max(bound, least) if everything else bound
            if everything:
                self.bound = max(self.bound, min(bound, self.best))
            if not self.close and not self.at(self._between(relaxed.weights)) and everything and len(self.moments) == moments:
                return

    def _cross(self, columns: Columns, shares: Sequence[Floats]) -> float:
        """Notes what is best of what costs least, of the options that relaxations mix, and of the best choices that are known. A bound, if
        that is all there is."""
        best = sorted(self.picks, key=lambda one: (max(self.picks[one][1].max(), self.budget), self.picks[one][0], one))[:CROSSED]
        self.mixed = mixed(columns, shares, self.mixed)
        kept = [mine | known for mine, known in zip(self.mixed, together(best, self.ascent), strict=True)]
        known = self.best + self.ascent.weighed.owed(self.budget)
        few, everything = columns_of(self.ascent, known, kept, self.moments, self.budget, most=PAIRS)
        asked = (*self.moments, len(few.rows), len(few.cost))
        again = asked in self.crossed or len(self.crossed) == CROSSINGS or bool(self.crossed and not everything)
        if again or not self.allowed.spend(few, BRANCHES):
            return -np.inf
        self.crossed.add(asked)
        report_progress(f"a plan within {bytes_text(self.budget)}, branch and bound")
        pick, least = few.whole(FEW_NODES, ENOUGH)
        if pick is not None:
            self.note(pick)
        return least if everything and least is not None else -np.inf

    def _between(self, weights: Sequence[float]) -> list[float]:
        """Prices half way from those of the highest bound: a program over some of the options says too much."""
        far = [*weights, *[0.0] * (len(self.moments) - len(weights))]
        near = [*self.weights, *[0.0] * (len(self.moments) - len(self.weights))]
        return [(one + other) / 2 for one, other in zip(far, near, strict=True)]


def within(
    model: Model,
    memory: Memory,
    budget: float,
    free: Narrowed,
    known: Sequence[Pick] = (),
    near: bool = False,
    allowed: Allowance | None = None,
    fewest: Callable[[Sequence[Pick]], Least] | None = None,
) -> tuple[list[Pick], float]:
    """Choices, and a bound on those that hold no more than the budget. `near`: with one small linear program at most; `fewest`: the fewest
    bytes, from choices that are known, asked where no price of bytes leads to what fits."""
    search = Within(model, memory, budget, free.whole, free.bound, allowed or Allowance())
    for pick in (free.pick, *known):
        search.note(pick)
    search.rise()
    if search.best == np.inf and fewest is not None:
        found = fewest(list(search.picks))
        search.fewest = found.bound
        search.note(found.best)
    if search.best < np.inf:
        search.narrow()
    if not search.nothing:
        search.programs(PROGRAMS[:1] if near else PROGRAMS)
    return list(search.picks), search.bound
