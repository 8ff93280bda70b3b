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
from meshc.passes.planner.cost_model import CostModel, Pick
from meshc.passes.planner.dual_ascent import DualAscent
from meshc.passes.planner.fewest_bytes import FewestBytes
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.linear_program import solve_program
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.narrow_options import MARGIN, NarrowedModel, columns_of, decode_choices, mixed_options, options_by_class
from meshc.passes.planner.relaxation import BRANCHES, Allowance, ProgramColumns
from meshc.passes.planner.search_space import Floats
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
class BudgetSearch:
    """The search within one budget.

    bound    no choice within the budget takes fewer seconds
    allowed  what its programs may come to
    moments  that have a price
    picks    choices, with their seconds and the bytes at each position
    """

    model: CostModel
    memory: MemoryModel
    budget: float
    ascent: DualAscent
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
    def fitting_pick(self) -> Pick | None:
        """The best choice that fits."""
        found = [one for one, (_, walked) in self.picks.items() if walked.max() <= self.budget]
        return min(found, key=lambda one: (self.picks[one][0], one), default=None)

    @property
    def fitting_seconds(self) -> float:
        """Its seconds."""
        return np.inf if self.fitting_pick is None else self.picks[self.fitting_pick][0]

    @property
    def is_infeasible(self) -> bool:
        """Whether no choice fits: each holds more, or the bound is above what the dearest of all takes."""
        return self.fewest * (1 - MARGIN) > self.budget or self.bound > self.dearest_s

    def is_near(self, bound: float, part: float) -> bool:
        """Whether the best choice that fits is so near to a bound."""
        return self.fitting_seconds < np.inf and self.fitting_seconds - bound <= part * self.fitting_seconds

    @property
    def is_close(self) -> bool:
        return self.is_near(self.bound, ENOUGH)

    def bound_at(self, weights: Sequence[float]) -> bool:
        """The bound and choices at these prices; whether one of the choices is new."""
        weighed = Lagrangian(self.model, self.memory, dict(zip(self.moments, weights, strict=True)))
        left = self.ascent.left
        ascent = DualAscent(weighed, left, self.ascent)
        owed = weighed.budget_charge(self.budget)
        for _ in range(SWEEPS):
            ascent.sweep((self.fitting_seconds + owed) * (1 + MARGIN))
        if ascent.lower_bound - owed > self.bound:
            self.weights = list(weights)
        self.bound = max(self.bound, min(ascent.lower_bound - owed, self.fitting_seconds))
        self.ascent = ascent if all(keep.all() for keep in ascent.keep) else DualAscent(
            weighed, [row[keep] for row, keep in zip(left, ascent.keep, strict=True)], ascent
        )
        known = len(self.picks)
        for pick in decode_choices(ascent, [] if self.fitting_pick is None else [self.fitting_pick]):
            self.note(pick)
        return len(self.picks) > known

    def raise_price(self) -> None:
        """Until something fits, or nothing does."""
        weight = START
        while self.fitting_seconds == np.inf and weight <= HIGHEST and not self.is_infeasible:
            self.bound_at([weight] * len(self.moments))
            weight *= RISE

    def narrow_prices(self) -> None:
        """Prices at which the cheapest of the known choices is dearest, while that finds new ones and the bound is not there."""
        for _ in range(PRICES):
            weights, most = self.dearest_weights()
            if self.is_close or most - self.bound <= ENOUGH * abs(most):
                break
            if not self.bound_at(weights):
                break

    def dearest_weights(self) -> tuple[list[float], float]:
        """Prices of the moments, and what the cheapest known choice costs at them, which is the most."""
        rows = [[*((self.budget - walked[self.moments]) * 1e-9), 1.0] for _, walked in self.picks.values()]
        seconds = [1e3 * one for one, _ in self.picks.values()]
        moments = len(self.moments)
        found = solve_program([*[0.0] * moments, -1.0], rows, seconds, bounds=[*[(0, None)] * moments, (None, None)])
        assert found is not None, "some choice costs most"
        return [float(one) * 1e-12 for one in found.x[:-1]], float(found.x[-1]) / 1e3

    def solve_programs(self, sizes: tuple[int, ...] = PROGRAMS) -> None:
        """Linear programs over what costs least beyond the bound, the second over more and so on, until one is over all that is left, or
        there is no allowance for the next."""
        for tried, most in enumerate((*sizes, *sizes[-1:] * MORE)):
            if self.is_close or (tried >= len(sizes) and self.fitting_seconds < np.inf):
                return
            moments, known = len(self.moments), self.fitting_seconds + self.ascent.weighed.budget_charge(self.budget)
            fitting = options_by_class([] if self.fitting_pick is None else [self.fitting_pick], self.ascent)
            columns, everything = columns_of(self.ascent, known, fitting, self.moments, self.budget, most=most)
            report_progress(f"a plan within {bytes_text(self.budget)}, linear program {tried + 1}")
            relaxed = columns.solve_relaxation() if self.allowed.spend(columns) else None
            if relaxed is None:
                return
            bound = relaxed.bound
            self.note(columns.round_shares(relaxed.shares))
            if not relaxed.is_integral and not self.is_near(bound, ENOUGH):
                least = self._branch_and_bound(columns, relaxed.shares)
                bound = max(bound, least) if everything else bound
            if everything:
                self.bound = max(self.bound, min(bound, self.fitting_seconds))
            if (
                not self.is_close
                and not self.bound_at(self._damped_weights(relaxed.weights))
                and everything
                and len(self.moments) == moments
            ):
                return

    def _branch_and_bound(self, columns: ProgramColumns, shares: Sequence[Floats]) -> float:
        """Notes what is best of what costs least, of the options that relaxations mix, and of the best choices that are known. A bound, if
        that is all there is."""
        best = sorted(self.picks, key=lambda one: (max(self.picks[one][1].max(), self.budget), self.picks[one][0], one))[:CROSSED]
        self.mixed = mixed_options(columns, shares, self.mixed)
        kept = [mine | known for mine, known in zip(self.mixed, options_by_class(best, self.ascent), strict=True)]
        known = self.fitting_seconds + self.ascent.weighed.budget_charge(self.budget)
        few, everything = columns_of(self.ascent, known, kept, self.moments, self.budget, most=PAIRS)
        asked = (*self.moments, len(few.rows), len(few.cost))
        again = asked in self.crossed or len(self.crossed) == CROSSINGS or bool(self.crossed and not everything)
        if again or not self.allowed.spend(few, BRANCHES):
            return -np.inf
        self.crossed.add(asked)
        report_progress(f"a plan within {bytes_text(self.budget)}, branch and bound")
        pick, least = few.solve_integer(FEW_NODES, ENOUGH)
        if pick is not None:
            self.note(pick)
        return least if everything and least is not None else -np.inf

    def _damped_weights(self, weights: Sequence[float]) -> list[float]:
        """Prices half way from those of the highest bound: a program over some of the options says too much."""
        far = [*weights, *[0.0] * (len(self.moments) - len(weights))]
        near = [*self.weights, *[0.0] * (len(self.moments) - len(self.weights))]
        return [(one + other) / 2 for one, other in zip(far, near, strict=True)]


def search_within_budget(
    model: CostModel,
    memory: MemoryModel,
    budget: float,
    free: NarrowedModel,
    known: Sequence[Pick] = (),
    near: bool = False,
    allowed: Allowance | None = None,
    fewest: Callable[[Sequence[Pick]], FewestBytes] | None = None,
) -> tuple[list[Pick], float]:
    """Choices, and a bound on those that hold no more than the budget. `near`: with one small linear program at most; `fewest`: the fewest
    bytes, from choices that are known, asked where no price of bytes leads to what fits."""
    search = BudgetSearch(model, memory, budget, free.whole, free.bound, allowed or Allowance())
    for pick in (free.pick, *known):
        search.note(pick)
    search.raise_price()
    if search.fitting_seconds == np.inf and fewest is not None:
        found = fewest(list(search.picks))
        search.fewest = found.bound
        search.note(found.best)
    if search.fitting_seconds < np.inf:
        search.narrow_prices()
    if not search.is_infeasible:
        search.solve_programs(PROGRAMS[:1] if near else PROGRAMS)
    return list(search.picks), search.bound
