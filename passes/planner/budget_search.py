"""Choices within a memory budget with a lower bound on their seconds, and the fewest bytes of any choice, by Lagrangian prices of a byte.

    price of a byte       raised from 0 until the cheapest choice fits, then narrowed between prices that fit and prices that do not
    bound                 of the weighted model, less price * budget; the highest is kept
    options left          those with a bound below the seconds of the best choice that fits
    linear program        over these, with a row for each moment that has a price: its duals give the next bound, its choice is a candidate
    fewest bytes          the same where seconds are zero, the budget is zero and prices add up to one: the bound is one on peak bytes

The cheapest choice at a price stays somewhat below the budget, or above it. Where several moments exceed the budget, each has a price of
its own; the prices are those that maximize the cost of the cheapest known choice (Kelley's cutting planes, J. SIAM 8(4), 1960; for the
fewest bytes a matrix game: von Neumann, 1928).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.planner.cost_model import CostModel, Pick
from meshc.passes.planner.descent import Descent
from meshc.passes.planner.dual_ascent import DualAscent
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.linear_program import solve_program
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.narrow_options import (
    BEST,
    PAIRS,
    ROUNDS,
    SWEEPS,
    NarrowedModel,
    columns_of,
    decode_choices,
    mixed_options,
    options_by_class,
)
from meshc.passes.planner.relaxation import BRANCHES, ENOUGH, Allowance
from meshc.passes.planner.search_space import MARGIN, Floats
from meshc.report.tables import bytes_text

PRICES: Final = 3
"""Rounds of new prices once a choice fits, before linear programs, where these leave a gap of WIDE at most. (Without an end they come
within ENOUGH by themselves for Llama 70B on 512 ranks, whose plan has 0.05 % more of a gap then, and takes 1 % more by the clock.)"""
WIDE: Final = 0.1
"""Gap with which rounds of new prices go on. (Gemma2 27B on two boxes of A100s keeps a gap of 36 % after three, and has 1.0 after ten.)"""
RISE: Final = 16.0
"""Factor of one price to the next, until a choice fits. (64: of the zoo's llama on `dp=8,tp=8` the same choices within 0.9, 0.75 and 0.6 of
its bytes, with gaps up to 2.1 % in place of 1.6, and within 0.4 one that is 0.3 % faster.)"""
CROSSED_PAIRS: Final = 5_000
"""Most pairs of forms in branch and bound, those of least cost. (Of the zoo's llama on `dp=8,tp=8` within 3/4 and 2/5 of its bytes, choices
from 10,000 are 1.7 % slower: the allowance covers fewer programs.)"""
UNIT: Final = 1e-12
"""Seconds per byte of a price in milliseconds per billion bytes: tolerances of solvers are absolute."""


@dataclass
class BudgetSearch:
    """Search within one memory budget.

    bound    lower bound on the seconds of a choice within the budget
    allowed  allowance of its linear programs
    moments  positions that have a price
    picks    known choices: seconds, and bytes at each position
    """

    model: CostModel
    memory: MemoryModel
    budget: float
    ascent: DualAscent
    bound: float
    allowed: Allowance
    moments: list[int] = field(default_factory=list)
    fewest: float = 0.0
    """Lower bound on the peak bytes of every choice."""
    crossed: set[tuple[int, ...]] = field(default_factory=set)
    """Programs given to branch and bound: moments, numbers of rows and columns. After the first, only programs over all options left are
    run."""
    picks: dict[Pick, tuple[float, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mixed: list[set[int]] = [set() for _ in self.model.own]
        changes = sum(group.count * sum(float(leg.price.max()) for leg in group.legs) for group in self.model.groups)
        self.dearest_s = sum(float(own.max()) for own in self.model.own) + changes

    def note(self, pick: Pick) -> bool:
        """Adds `pick` to the known choices; returns whether it fits. If not, its peak moment has a price from then on."""
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
        """The best known choice that fits, None if there is none."""
        found = [one for one, (_, walked) in self.picks.items() if walked.max() <= self.budget]
        return min(found, key=lambda one: (self.picks[one][0], one), default=None)

    @property
    def fitting_seconds(self) -> float:
        """Seconds of `fitting_pick`, infinite without one."""
        return np.inf if self.fitting_pick is None else self.picks[self.fitting_pick][0]

    @property
    def nearest_picks(self) -> list[Pick]:
        """Known choices: those that fit, the fastest first, then the others, that of fewest bytes first."""
        return sorted(self.picks, key=lambda one: (max(self.picks[one][1].max(), self.budget), self.picks[one][0], one))

    @property
    def is_infeasible(self) -> bool:
        """Whether no choice fits: the fewest bytes exceed the budget, or the bound exceeds the cost of the most expensive choice."""
        return self.fewest * (1 - MARGIN) > self.budget or self.bound > self.dearest_s

    def is_near(self, bound: float, part: float) -> bool:
        """Whether the best choice that fits is within `part` of its seconds of `bound`."""
        return self.fitting_seconds < np.inf and self.fitting_seconds - bound <= part * self.fitting_seconds

    @property
    def is_close(self) -> bool:
        return self.is_near(self.bound, ENOUGH)

    def bound_at(self, weights: Sequence[float]) -> bool:
        """Sweeps at the prices `weights`, raising the bound and adding choices; returns whether one of the choices is new."""
        weighed = Lagrangian(self.model, self.memory, dict(zip(self.moments, weights, strict=True)))
        left = self.ascent.left
        ascent = DualAscent(weighed, left, self.ascent)
        owed = weighed.budget_charge(self.budget)
        for _ in range(SWEEPS):
            ascent.sweep((self.fitting_seconds + owed) * (1 + MARGIN))
        self.bound = max(self.bound, min(ascent.lower_bound - owed, self.fitting_seconds))
        self.ascent = ascent if all(keep.all() for keep in ascent.keep) else DualAscent(
            weighed, [row[keep] for row, keep in zip(left, ascent.keep, strict=True)], ascent
        )
        known = len(self.picks)
        for pick in decode_choices(ascent, self.nearest_picks[:1]):
            self.note(pick)
        return len(self.picks) > known

    def raise_price(self) -> None:
        """Raises one price for all moments until a choice fits, or none can: from that at which the bytes that the fastest choice holds too
        much cost what a search leaves open, to that at which those of the smallest cost more than any choice takes and the bound no longer
        rises."""
        seconds, walked = min(self.picks.values(), key=lambda one: one[0])
        weight = ENOUGH * (seconds or self.dearest_s) / max(1.0, walked.max() - self.budget)
        rose = True
        while self.fitting_seconds == np.inf and not self.is_infeasible and (rose or weight * self._fewest_over < self.dearest_s):
            before = self.bound
            self.bound_at([weight] * len(self.moments))
            rose, weight = self.bound > before, weight * RISE

    @property
    def _fewest_over(self) -> float:
        """Bytes by which the smallest known choice exceeds the budget."""
        return min(float(walked.max()) for _, walked in self.picks.values()) - self.budget

    def narrow_prices(self) -> None:
        """Bounds at the prices of `dearest_weights`, while new choices appear and the bound is not close to their value."""
        for turn in range(ROUNDS):
            weights, most = self.dearest_weights()
            if turn >= PRICES and self.is_near(self.bound, WIDE):
                break
            if self.is_close or most - self.bound <= ENOUGH * abs(most) or not self.bound_at(weights):
                break

    def dearest_weights(self, unit: bool = False) -> tuple[list[float], float]:
        """Prices of the moments that maximize the cost of the cheapest known choice, and that cost in seconds. `unit`: prices that add up
        to UNIT."""
        rows = [[*((self.budget - walked[self.moments]) * 1e-9), 1.0] for _, walked in self.picks.values()]
        seconds = [1e3 * one for one, _ in self.picks.values()]
        moments = len(self.moments)
        total = ([[*[1.0] * moments, 0.0]], [1.0]) if unit else (None, None)
        found = solve_program([*[0.0] * moments, -1.0], rows, seconds, *total, bounds=[*[(0, None)] * moments, (None, None)])
        assert found is not None, "some choice costs most"
        return [float(one) * UNIT for one in found.x[:-1]], float(found.x[-1]) / 1e3

    def solve_programs(self, count: int) -> None:
        """Solves linear programs over the options of least cost beyond the bound, until one is over all options left or the allowance does
        not cover the next."""
        for tried in range(count):
            if self.is_close:
                return
            moments, known = len(self.moments), self.fitting_seconds + self.ascent.weighed.budget_charge(self.budget)
            fitting = options_by_class([] if self.fitting_pick is None else [self.fitting_pick], self.ascent)
            columns, everything = columns_of(self.ascent, known, fitting, self.moments, self.budget, most=PAIRS)
            report_progress(f"a plan within {bytes_text(self.budget)}, linear program {tried + 1}")
            relaxed = columns.solve_relaxation() if self.allowed.spend(columns) else None
            if relaxed is None:
                return
            bound = relaxed.bound
            self.note(columns.round_shares(relaxed.shares))
            if not relaxed.is_integral and not self.is_near(bound, ENOUGH):
                self.mixed = mixed_options(columns, relaxed.shares, self.mixed)
                report_progress(f"a plan within {bytes_text(self.budget)}, branch and bound")
                _, least = self.branch_and_bound(known, self.budget, self.mixed)
                bound = max(bound, least) if everything else bound
            if everything:
                self.bound = max(self.bound, min(bound, self.fitting_seconds))
            if (
                not self.is_close
                and not self.bound_at([*relaxed.weights, *[0.0] * (len(self.moments) - moments)])
                and everything
                and len(self.moments) == moments
            ):
                return

    def branch_and_bound(self, known: float, budget: float, mixed: Sequence[Collection[int]] = ()) -> tuple[bool, float]:
        """Whether branch and bound finds a new choice within `budget` bytes, over options of least cost and those of the nearest choices
        and in `mixed`; and a lower bound if these are all options left, else -inf."""
        kept = options_by_class(self.nearest_picks[:BEST], self.ascent)
        kept = [mine.union(others) for mine, others in zip(kept, mixed, strict=True)] if mixed else kept
        few, everything = columns_of(self.ascent, known, kept, self.moments, budget, most=CROSSED_PAIRS)
        asked = (*self.moments, len(few.rows), len(few.cost))
        again = asked in self.crossed or bool(self.crossed and not everything)
        if again or not self.allowed.spend(few, BRANCHES):
            return False, -np.inf
        self.crossed.add(asked)
        pick, least = few.solve_integer()
        count = len(self.picks)
        if pick is not None:
            self.note(pick)
        return len(self.picks) > count, least if everything and least is not None else -np.inf

    def improve_fitting(self) -> None:
        """Adds what the best known choices that fit become a class at a time, as long as they fit. (Of Llama 70B on 4096 ranks that takes
        0.3 s, and brings a gap of 21 % to 9 where half of what can be overlapped counts.)"""
        descent = Descent(Lagrangian(self.model, self.memory), self.model.everything)
        for pick in self.nearest_picks[:BEST]:
            if self._fits(pick):
                self.note(descent.improve(pick, fits=self._fits))

    def _fits(self, pick: Pick) -> bool:
        return bool(self.memory.walk(pick).max() <= self.budget)


@dataclass(frozen=True)
class FewestBytes:
    """`best`: the known choice of fewest peak bytes, `held_bytes`;  `bound`: lower bound on the peak bytes of every choice."""

    best: Pick
    held_bytes: float
    bound: float


def find_fewest_bytes(model: CostModel, memory: MemoryModel, known: Sequence[Pick], allowed: Allowance | None = None) -> FewestBytes:
    """Fewest bytes of a choice, from the choices `known`; `allowed`: allowance of branch and bound, which is asked once messages bring no
    new choice, for one with slightly fewer bytes than the best known."""
    groups = [replace(group, legs=tuple(replace(leg, price=np.zeros_like(leg.price)) for leg in group.legs)) for group in model.groups]
    free = replace(model, own=[np.zeros_like(own) for own in model.own], groups=groups)
    search = BudgetSearch(free, memory, 0.0, DualAscent(Lagrangian(free, memory), free.everything), 0.0, allowed or Allowance())
    for pick in known:
        search.note(pick)
    search.moments = [int(search.picks[search.nearest_picks[0]][1].argmax())]
    weights = [UNIT]
    while True:
        new = search.bound_at(weights)
        best = search.nearest_picks[0]
        held = float(search.picks[best][1].max())
        close = held * UNIT <= search.bound * (1 + ENOUGH)
        if not close and not new:
            new, _ = search.branch_and_bound(search.ascent.weighed.seconds(best), held * (1 - ENOUGH))
        if close or not new:
            return FewestBytes(best, held, search.bound / UNIT)
        weights, _ = search.dearest_weights(unit=True)


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
    """Choices, some of which may exceed the budget, and a lower bound on the seconds of those within it. `near`: at most one small linear
    program; `fewest`: search for the fewest bytes from known choices, for the case that no price leads to a choice that fits."""
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
        search.solve_programs(1 if near else ROUNDS)
    search.improve_fitting()
    return list(search.picks), search.bound
