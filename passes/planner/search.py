"""The search: choices for the axes that a plan leaves open, best first, each with its certificate.

Messages between classes give a bound, and with it which options a best choice may have (`narrow.py`); a linear program decides between
those that are left (`solve.py`). Within a budget a byte at the fullest moments has a price (`within.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

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
from meshc.passes.planner.narrow import Narrowed, closed, narrow
from meshc.passes.planner.survey import searched_axes, survey
from meshc.passes.planner.ties import plainest
from meshc.passes.planner.weighed import Weighed
from meshc.passes.planner.within import within
from meshc.plan.entries import AxisEntry


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
    least: float | None = None
    """The fewest bytes that any choice holds by the model, of those that were found."""

    def __post_init__(self) -> None:
        placed = self.placed
        open_axes = searched_axes(placed) if self.open_axes is None else tuple(self.open_axes)
        self.space = widened(survey(placed, open_axes, _baseline(placed, open_axes)), self.beside)
        self.folded = fold.fold(self.space, self.near)
        self.model = model.build(self.space, self.folded, placed.factors, placed.mesh, self.device)
        self.memory = Memory(self.model, placed)
        self.everything = [np.arange(len(own)) for own in self.model.own]
        self._known = [self.pick_of(plan) for plan in self.beside]
        self._free: Narrowed | None = None

    def found(self, budget: float | None = None) -> list[Found]:
        """Choices that hold no more than the budget by the model, the cheapest first; none where none was found."""
        free = self._unbounded()
        if budget is None or self.held(free.pick) <= budget:
            return [self._with_certificate(free.pick, free.bound, budget)]
        picks, bound = within(self.model, self.memory, budget, free, self._known)
        fitting = [one for one in picks if self.held(one) <= budget]
        return [self._with_certificate(one, bound, budget) for one in sorted(fitting, key=lambda one: (self.model.seconds(one), one))]

    def hiding(self, part: float = overlap.HIDDEN) -> Search:
        """The same search, in which what can be hidden behind computing counts for this part of its price."""
        other = copy(self)
        other.model = overlap.hiding(self.model, part)
        other.memory = Memory(other.model, self.placed)
        other._free = None
        return other

    @property
    def least_s(self) -> float:
        """No choice takes fewer seconds, whatever it holds."""
        return self._unbounded().bound

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

    def _unbounded(self) -> Narrowed:
        if self._free is None:
            self._free = closed(narrow(Weighed(self.model, self.memory), self.everything, self._known))
        return self._free


def _baseline(placed: Placed, open_axes: Sequence[str]) -> Assignment | None:
    """What the plan has the other axes do, the searched ones doing nothing."""
    if set(searched_axes(placed)) <= set(open_axes):
        return None
    kept = [entry for entry in placed.plan.axes if entry.axis not in open_axes]
    idle = [AxisEntry(axis) for axis in open_axes]
    return assign(replace(placed, plan=placed.plan.having((*kept, *idle)))).decided()
