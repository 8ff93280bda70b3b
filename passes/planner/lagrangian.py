"""Cost model in which bytes at some moments cost seconds: a Lagrangian (Everett, Operations Research 11(3), 1963).

    seconds of a choice + sum over moments of weight * (bytes that it holds there - budget)        at the least: a bound within the budget

It is said from below: what a class reads of itself is left out where it may travel with what others read, and a form that is brought
counts where each of its readers alone keeps it alive. What a bound needs stays true; a choice is judged by the model itself.
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
    weights  seconds a byte, by moment
    plain    of each class's options, all its members together;  own  with what a class reads of itself
    extra    of each group and each of its legs, seconds of the memory that the leg alone keeps alive, by given form and wanted form
    price    likewise with the change of sharding
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
        """Of a choice, as it is."""
        found = self.model.seconds(pick)
        if self.weights:
            walked = self.memory.walk(pick) - self.memory.fixed
            found += sum(weight * float(walked[moment]) for moment, weight in self.weights.items())
        return found

    def budget_charge(self, budget: float) -> float:
        """What to take from a bound on the weighed seconds for one on the seconds within the budget."""
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
    """What a class pays for a reading of its own, by its options, where no other leg may pay for it."""
    given, wants = group.given, leg.forms
    gathers = leg.gathers[given, wants]
    shared = np.zeros(len(given), dtype=bool)
    for other in group.legs:
        if other is not leg:
            shared |= np.isin(wants, other.forms) & (~gathers | (other.phase == leg.phase))
    found: Floats = np.where(shared, 0.0, price[given, wants])
    return found
