"""The search: choices for the axes that a plan leaves open, best first, each with its certificate.

Without a budget the relaxation is solved once, and is almost always whole. With one, a byte at the fullest moment is given a price, which
rises until what is chosen fits, and is narrowed down from then on (Everett's Lagrange multipliers, Operations Research 11(3),
1963): each price gives a bound, and whole choices. Of the options that any of them took branch and bound makes the best that fits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Final

from meshc.cost.devices import Device
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import Choices
from meshc.passes.phases.placed import Placed
from meshc.passes.place.assign import assign
from meshc.passes.planner import fold, model, overlap
from meshc.passes.planner.beside import option_of, widened
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.chosen import choices
from meshc.passes.planner.memory import Memory
from meshc.passes.planner.model import Pick
from meshc.passes.planner.solve import Columns
from meshc.passes.planner.survey import searched_axes, survey
from meshc.passes.planner.ties import plainest
from meshc.plan.entries import AxisEntry

RISE: Final = 16.0
HIGHEST: Final = 1e-3
"""Memory's price rises so fast, and to so many seconds a byte: then nothing fits."""
HALVINGS: Final = 4
FEW: Final = 20_000
"""Columns of which branch and bound looks at all, not only at what relaxations took."""
START: Final = 1e-13
"""Seconds that a byte costs at first: a gigabyte a tenth of a millisecond."""
SHARE: Final = 1e-6
"""Of an option, what the relaxation must take of it for branch and bound to look at it."""


@dataclass(frozen=True)
class Found:
    choices: Choices
    certificate: Certificate
    pick: Pick


@dataclass
class Search:
    """One model, asked for several budgets. `placed` has been annotated. `beside`: plans that have a price by it too."""

    placed: Placed
    device: Device
    open_axes: Collection[str] | None = None
    beside: Sequence[Assignment] = ()
    near: bool = False
    """Whether layers beside those that were not captured are held to decide as these, where they hand each other values."""
    moments: list[int] = field(default_factory=list)
    least: float | None = None
    """The fewest bytes that any choice holds by the model, of those that were found."""

    def __post_init__(self) -> None:
        placed = self.placed
        open_axes = searched_axes(placed) if self.open_axes is None else tuple(self.open_axes)
        self.space = widened(survey(placed, open_axes, _baseline(placed, open_axes)), self.beside)
        self.folded = fold.fold(self.space, self.near)
        self.model = model.build(self.space, self.folded, placed.factors, placed.mesh, self.device)
        self.memory = Memory(self.model, placed)
        self.everything = [range(len(own)) for own in self.model.own]
        self._free: tuple[Pick, float] | None = None

    def found(self, budget: float | None = None) -> list[Found]:
        """Choices that hold no more than the budget by the model, the cheapest first; none where none was found."""
        pick, bound = self._unbounded()
        if budget is None or self.held(pick) <= budget:
            return [self._with_certificate(pick, bound, budget)]
        picks, bound = self._within(budget, pick, bound)
        fitting = [one for one in dict.fromkeys(picks) if self.held(one) <= budget]
        return [self._with_certificate(one, bound, budget) for one in sorted(fitting, key=lambda one: (self.model.seconds(one), one))]

    def hiding(self) -> Search:
        """The same search, in which what can be hidden behind computing counts less."""
        other = copy(self)
        other.model = overlap.hiding(self.model)
        other.memory = Memory(other.model, self.placed)
        other._free = None
        return other

    def pick_of(self, plan: Assignment) -> Pick:
        """The options that a plan takes, one of those `beside`: of a class what its first member does."""
        first = (self.space.decisions[members[0]] for members in self.folded.members)
        return tuple(one.options.index(option_of(self.space, one, plan)) for one in first)

    def held(self, pick: Pick) -> float:
        """Bytes that a rank holds at the fullest moment of a choice."""
        found = float(self.memory.walk(pick).max())
        self.least = found if self.least is None else min(found, self.least)
        return found

    def _with_certificate(self, pick: Pick, bound: float, budget: float | None) -> Found:
        count, pick = sum(map(len, self.everything)), plainest(self.model, self.memory, pick)
        certificate = Certificate(self.model.seconds(pick), bound, self.held(pick), budget, len(self.everything), count)
        return Found(choices(self.placed, self.space, self.folded, pick), certificate, pick)

    def _unbounded(self) -> tuple[Pick, float]:
        if self._free is None:
            self._free = self._priced(0.0)
        return self._free

    def _priced(self, weight: float) -> tuple[Pick, float]:
        """The cheapest choice where memory costs so much, and the bound on its cost."""
        columns = Columns(self.model, self.memory, self.everything, self.moments if weight else (), None, weight)
        relaxed = columns.relaxed()
        assert relaxed is not None, "a search without a budget has an answer"
        if all(part.max() > 1 - SHARE for part in relaxed.shares):
            return columns.rounded(relaxed.shares), relaxed.bound
        keep = [[option for option, share in enumerate(part) if share > SHARE] for part in relaxed.shares]
        if len(columns.cost) <= FEW:
            keep = [list(row) for row in self.everything]
        pick, bound = Columns(self.model, self.memory, keep, self.moments if weight else (), None, weight).whole()
        exact = bound is not None and len(columns.cost) <= FEW
        return pick or columns.rounded(relaxed.shares), max(relaxed.bound, bound or 0.0) if exact else relaxed.bound

    def _within(self, budget: float, free: Pick, bound: float) -> tuple[list[Pick], float]:
        """Choices at several prices of memory, what branch and bound makes of their options, and the best bound."""
        picks = [free]
        self._note(free)
        low, weight = 0.0, START
        high: float | None = None
        narrowed = 0
        while narrowed <= 2 * HALVINGS and weight <= HIGHEST:
            pick, cost = self._priced(weight)
            picks.append(pick)
            fixed = len(self.moments) * (budget - self.memory.fixed)
            bound = max(bound, cost - weight * fixed)
            if self.held(pick) <= budget:
                high = weight
            else:
                self._note(pick)
                low = weight
            if high is None:
                weight *= RISE
                continue
            narrowed += 1
            if high <= low * 1.2:
                break
            weight = (low * high) ** 0.5 if low else high / 4
        keep = [sorted({pick[at] for pick in picks}) for at in range(len(self.everything))]
        few = len(Columns(self.model, self.memory, self.everything).cost) <= FEW
        for _ in range(HALVINGS):
            best, least = Columns(self.model, self.memory, self.everything if few else keep, self.moments, budget).whole()
            bound = max(bound, least or 0.0) if few else bound
            if best is None:
                break
            picks.append(best)
            if self.held(best) <= budget:
                break
            self._note(best)
        return picks, bound

    def _note(self, pick: Pick) -> None:
        """The fullest moment of a choice, at which memory is bounded from now on."""
        moment = int(self.memory.walk(pick).argmax())
        if moment not in self.moments:
            self.moments.append(moment)


def _baseline(placed: Placed, open_axes: Sequence[str]) -> Assignment | None:
    """What the plan has the other axes do, the searched ones doing nothing."""
    if set(searched_axes(placed)) <= set(open_axes):
        return None
    kept = [entry for entry in placed.plan.axes if entry.axis not in open_axes]
    idle = [AxisEntry(axis) for axis in open_axes]
    return assign(replace(placed, plan=placed.plan.having((*kept, *idle)))).decided()
