"""Lagrangian of the cost model, in which bytes at some moments cost seconds (Everett, Operations Research 11(3), 1963).

    seconds of a choice + sum over moments of weight * (bytes that it holds there - budget)        its minimum is a bound within the budget

It is a lower estimate: a class's reading of its own value is left out where other legs may share the change, and a resharded form counts
for each leg only while that leg by itself keeps it alive. Bounds stay valid; `seconds` of a choice is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from meshc.passes.planner.cost_model import CostModel, Leg, Pick, ValueGroup
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.search_space import Floats


@dataclass
class Lagrangian:
    """
    weights  seconds per byte, by moment
    plain    by class: seconds of each option for all members, memory included;  own  the same with readings of own values
    extra    by group and leg: seconds, by given and wanted form, of memory that the leg by itself keeps alive
    price    the same with the change of sharding
    """

    model: CostModel
    memory: MemoryModel
    weights: Mapping[int, float] = field(default_factory=dict)
    plain: list[Floats] = field(default_factory=list)
    own: list[Floats] = field(default_factory=list)
    extra: list[list[Floats | None]] = field(default_factory=list)
    price: list[list[Floats]] = field(default_factory=list)

    def __post_init__(self) -> None:
        whole = sum(self.weights.values())
        self.plain = [own + whole * stored for own, stored in zip(self.model.own, self.memory.stored, strict=True)]
        self.own = [own.copy() for own in self.plain]
        for group in self.model.groups:
            alive = sum(weight * self.memory.held_at(moment, group) for moment, weight in self.weights.items())
            settled = np.array([not form[1] for form in group.lies])
            for rows in (self.plain, self.own) if alive else ():
                rows[group.maker] += (alive * settled * group.held)[group.given]
            self.extra.append([self._resharded_seconds(group, leg) for leg in group.legs])
            base = np.minimum.reduce([group.count * leg.price for leg in group.legs]) if group.legs else np.zeros((0, 0))
            self.price.append([base if extra is None else base + extra for extra in self.extra[-1]])
            for at, leg in enumerate(group.legs):
                if leg.reader == group.maker:
                    self.own[group.maker] += _own_reading_costs(group, leg, self.price[-1][at])

    def seconds(self, pick: Pick) -> float:
        """Exact seconds of a choice, memory included, budget not subtracted."""
        found = self.model.seconds(pick)
        if self.weights:
            walked = self.memory.walk(pick) - self.memory.fixed
            found += sum(weight * float(walked[moment]) for moment, weight in self.weights.items())
        return found

    def budget_charge(self, budget: float) -> float:
        """Difference between a bound on weighted seconds and one on seconds within the budget."""
        return sum(self.weights.values()) * (budget - self.memory.fixed)

    def _resharded_seconds(self, group: ValueGroup, leg: Leg) -> Floats | None:
        seconds = [0.0, 0.0]
        partial = {bool(form[1]) for form in group.lies}
        for moment, weight in self.weights.items():
            for given in partial:
                seconds[given] += weight * self.memory.resharded_at(moment, group, [leg], given)
        if not any(seconds):
            return None
        rows = np.array([seconds[bool(form[1])] for form in group.lies])
        found: Floats = rows[:, None] * group.brought[None, :]
        place = {form: number for number, form in enumerate(group.wants)}
        for number, lies in enumerate(group.lies):
            if lies in place:
                found[number, place[lies]] = 0.0
        return found


def _own_reading_costs(group: ValueGroup, leg: Leg, price: Floats) -> Floats:
    """Seconds, by option of a class, of a reading of its own value, 0 where another leg may pay for the change."""
    given, wants = group.given, leg.forms
    gathers = leg.gathers[given, wants]
    shared = np.zeros(len(given), dtype=bool)
    for other in group.legs:
        if other is not leg:
            shared |= np.isin(wants, other.forms) & (~gathers | (other.phase == leg.phase))
    found: Floats = np.where(shared, 0.0, price[given, wants])
    return found
