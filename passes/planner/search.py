"""Search over the axes that a plan leaves open: choices, best first, each with a certificate of its gap.

Messages between classes give a bound, and with it which options a best choice may have (`narrow.py`); a linear program decides between
those that are left (`solve.py`). Within a budget a byte at the fullest moments has a price (`within.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from meshc.cost.devices import Device
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.choices import AxisChoices
from meshc.passes.phases.compiler_pass import report_progress
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.annotate import annotate
from meshc.passes.place.assign import assign
from meshc.passes.planner import fold, overlap
from meshc.passes.planner.beside import option_of, widened
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.chosen import choices
from meshc.passes.planner.least import Least, least
from meshc.passes.planner.memory import Memory
from meshc.passes.planner.model import Model, Pick, build
from meshc.passes.planner.moves import Moves
from meshc.passes.planner.narrow import Narrowed, closed, narrow
from meshc.passes.planner.operators import Operators
from meshc.passes.planner.solve import Allowance
from meshc.passes.planner.space import Key, Option, Space
from meshc.passes.planner.survey import Base, searched_axes, survey
from meshc.passes.planner.ties import plainest
from meshc.passes.planner.weighed import Weighed
from meshc.passes.planner.within import within
from meshc.plan.entries import AxisEntry, Term
from meshc.plan.recipes import by_role

ALL_OF: Final = 3
"""Axes of which every option of every decision is known. Of more it is those around a plan, then around what is found, and so on,"""
STEPS: Final = 6
"""so often. (Within a budget with small linear programs, and only at the end with all.)"""
ANSWERS: Final = 8
"""Choices that a search within a budget answers with at most."""


@dataclass(frozen=True)
class Found:
    """`pick` is of `model`; `options` of all decisions."""

    choices: AxisChoices
    certificate: Certificate
    pick: Pick
    model: Model
    options: tuple[Option, ...]


@dataclass
class Search:
    """One model, asked for several budgets. `placed` has been annotated. `beside`: plans that have a price by it too."""

    placed: PlacedModel
    device: Device
    open_axes: Collection[str] | None = None
    beside: Sequence[Assignment] = ()
    near: bool = False
    """Whether layers beside those that were not captured are held to decide as these, where they hand each other values."""
    again: bool = False
    """Whether backward may recompute values: what is held is the least that this comes to."""
    least: float | None = None
    """The fewest bytes that any choice holds by the model, of those that were found. Where nothing keeps a budget, it is looked for."""
    allowed: Allowance = field(default_factory=Allowance)
    """What linear programs within budgets may come to, of this and of all searches that are made of it."""

    def __post_init__(self) -> None:
        placed = self.placed
        self._open = searched_axes(placed) if self.open_axes is None else tuple(self.open_axes)
        self._baseline = _baseline(placed, self._open)
        sizes = {axis: placed.sizes[axis] for axis in searched_axes(placed)}
        self._operators = Operators(placed.factors, placed.mesh, sizes, self.device)
        self._moves = Moves(placed.mesh, sizes, self.device)
        self._hidden: float | None = None
        self.some = len(self._open) > ALL_OF
        """Whether options are those around a plan: there are too many axes for all."""
        self._survey(_of_plan(searched_axes(placed), by_roles(placed, self._open)) if self.some else None)
        if self.some:
            self._step(lambda: self._unbounded().pick)

    def with_plans(self, plans: Sequence[Assignment]) -> Search:
        """The same search, in which plans have a price too. Where they do nothing that is no option yet, its model is the same."""
        if self.some:
            return replace(self, beside=plans)
        other = copy(self)
        other.beside, space = plans, widened(self.space, plans)
        if space.decisions != self.space.decisions:
            other._build(space)
        other._known, other._free = [other.pick_of(plan) for plan in plans], None
        return other

    def _survey(self, around: Base | None) -> None:
        self._build(widened(survey(self.placed, self._open, self._baseline, around), self.beside))

    def _build(self, space: Space) -> None:
        self.space = space
        self.folded = fold.fold(self.space, self.near)
        self.plain = self.model = build(self.space, self.folded, self._operators, self._moves)
        if self._hidden is not None:
            self.model = overlap.hiding(self.plain, self._hidden)
        self.memory = Memory(self.model, self.placed, self.again)
        self.everything = [np.arange(len(own)) for own in self.model.own]
        self._known = [self.pick_of(plan) for plan in self.beside]
        self._free: Narrowed | None = None
        self._fewest: list[Least] = []
        """The fewest bytes, once they have been looked for; for all questions about the same choices."""
        self.smallest: Found | None = None
        """The choice that holds least, where it had to be looked for."""
        self._begun: Narrowed | None = None
        """What another question about the same choices has come to."""

    def _step(self, best: Callable[[], Pick]) -> None:
        """Around what is best around what was best before, until that is the same."""
        before = None
        for _ in range(STEPS):
            found = self._options(best())
            if found == before:
                break
            before = found
            self._survey(lambda decision: found[decision.key])  # noqa: B023

    def found(self, budget: float | None = None) -> list[Found]:
        """Choices that hold no more than the budget by the model, the cheapest ANSWERS first; none where none was found."""
        free = self._unbounded()
        if budget is None or self.held(free.pick) <= budget:
            return [self._with_certificate(free.pick, free.bound, budget)]
        near = copy(self) if self.some else self
        if self.some:
            near._step(lambda: near._nearest(near._within(budget, near=True)[0], budget))
        picks, bound = near._within(budget)
        if not any(near.held(one) <= budget for one in picks):
            smallest = min([near._least(picks).best, *picks], key=near.held)
            self.smallest, picks = near._with_certificate(smallest, bound, budget), [*picks, smallest]
        fitting = [one for one in picks if near.held(one) <= budget]
        self.least = near.least
        best = sorted(fitting, key=lambda one: (near.model.seconds(one), one))[:ANSWERS]
        return [near._with_certificate(one, bound, budget) for one in best]

    def _within(self, budget: float, near: bool = False) -> tuple[list[Pick], float]:
        """`near`: whether one small linear program will do."""
        with self.allowed.half() as allowed:
            return within(self.model, self.memory, budget, self._unbounded(), self._known, near, allowed, None if near else self._least)

    def _least(self, picks: Sequence[Pick]) -> Least:
        """The fewest bytes, from choices that are known: the same for any budget, and whatever counts of seconds."""
        if not self._fewest:
            report_progress("the fewest bytes of a plan")
            with self.allowed.half() as allowed:
                self._fewest.append(least(self.model, self.memory, self.everything, picks, allowed))
        return self._fewest[0]

    def _nearest(self, picks: Sequence[Pick], budget: float) -> Pick:
        """The fastest that fits, or else the one that holds least."""
        return min(picks, key=lambda one: (max(self.held(one), budget), self.model.seconds(one), one))

    def hiding(self, part: float = overlap.HIDDEN) -> Search:
        """The same search, in which what can be hidden behind computing counts for this part of its price. It begins where this one has
        come to."""
        other = copy(self)
        other._hidden, other.model = part, overlap.hiding(self.plain, part)
        other.memory = Memory(other.model, self.placed, self.again)
        other._begun, other._free = self._free, None
        return other

    def holding(self) -> Search:
        """The same search, in which layers beside those that were not captured decide as these."""
        if self.some:
            return replace(self, near=True)
        other = copy(self)
        other.near = True
        other._build(self.space)
        return other

    def recomputing(self) -> Search:
        """The same search, where backward may recompute values."""
        other = copy(self)
        other.again, other.least, other.smallest, other._fewest = True, None, None, []
        other.memory = Memory(other.model, self.placed, True)
        return other

    @property
    def least_s(self) -> float:
        """No choice takes fewer seconds, whatever it holds. (Of more axes than those whose options are all known nothing is said.)"""
        return 0.0 if self.some else self._unbounded().bound

    def pick_of(self, plan: Assignment) -> Pick:
        """The options that a plan takes, one of those `beside`: of a class what its first member does."""
        first = (self.space.decisions[members[0]] for members in self.folded.members)
        return tuple(one.options.index(option_of(self.space.axes, one, plan)) for one in first)

    def options_of(self, plan: Assignment) -> tuple[Option, ...]:
        """What a plan decides of everything."""
        return tuple(option_of(self.space.axes, one, plan) for one in self.space.decisions.values())

    def held(self, pick: Pick) -> float:
        """Bytes that a rank holds at the fullest moment of a choice."""
        found = float(self.memory.walk(pick).max())
        self.least = found if self.least is None else min(found, self.least)
        return found

    def _options(self, pick: Pick) -> dict[Key, Option]:
        """What a choice takes of each decision."""
        return {key: decision.options[pick[self.folded.of[key]]] for key, decision in self.space.decisions.items()}

    def _with_certificate(self, pick: Pick, bound: float, budget: float | None) -> Found:
        count, pick = sum(map(len, self.everything)), plainest(self.model, self.memory, pick)
        certificate = Certificate(self.model.seconds(pick), bound, self.held(pick), budget, len(self.everything), count, self.some)
        options = tuple(self._options(pick).values())
        return Found(choices(self.placed, self.space, self.folded, pick), certificate, pick, self.plain, options)

    def _unbounded(self) -> Narrowed:
        if self._free is None:
            self._free = closed(narrow(Weighed(self.model, self.memory), self.everything, self._known, self._begun))
        return self._free


def by_roles(placed: PlacedModel, axes: Sequence[str]) -> Assignment:
    """What axes do by their names, those that stand for nothing with the batch."""
    entries = [by_role(axis) or AxisEntry(axis, ((Term("batch"),),)) for axis in axes]
    kept = [entry for entry in placed.plan.axes if entry.axis not in axes]
    request = replace(placed.request, plan=placed.plan.having((*kept, *entries)))
    return assign(annotate(placed.with_request(request))).require_assignment()


def _of_plan(axes: Sequence[str], plan: Assignment) -> Base:
    return lambda decision: option_of(axes, decision, plan)


def _baseline(placed: PlacedModel, open_axes: Sequence[str]) -> Assignment | None:
    """What the plan has the other axes do, the searched ones doing nothing."""
    if set(searched_axes(placed)) <= set(open_axes):
        return None
    kept = [entry for entry in placed.plan.axes if entry.axis not in open_axes]
    idle = [AxisEntry(axis) for axis in open_axes]
    return assign(replace(placed, plan=placed.plan.having((*kept, *idle)))).require_assignment()
