"""What the messages leave open, solved: a linear relaxation, and closed by branch and bound. (HiGHS, by scipy.)

Columns, each in [0, 1]: an option of a class; for a leg, a pair of the form that is given and the form that is wanted; a change of
sharding that several legs share; a form that several legs keep alive at a moment. Rows: each class takes one option; a leg's pairs that
begin with a form add up to the options that give it, those that end with one to the options that want it; a shared change is there for
each leg that uses it; what a rank holds at some moments is within the budget.

Everything ends by iterations, nodes or a gap, never by seconds: one version of scipy gives one answer on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, vstack

from meshc.passes.planner.memory import Memory
from meshc.passes.planner.model import Group, Leg, Model, Pick
from meshc.passes.planner.space import Floats, Numbers

MILLI: Final = 1e3
"""Seconds are solved as milliseconds: tolerances of solvers are absolute."""
ITERATIONS: Final = 2_000_000
NODES: Final = 50
GAP: Final = 1e-3
SHARE: Final = 1e-6
"""What a column that is whole may lack of it."""


@dataclass(frozen=True)
class Relaxed:
    """
    bound    no choice costs less (seconds), within the options and pairs that were given
    shares   of each class, how much of each option the relaxation takes
    weights  seconds that a byte is worth at each moment
    """

    bound: float
    shares: tuple[Floats, ...]
    weights: tuple[float, ...]

    @property
    def whole(self) -> bool:
        return all(part.max() > 1 - SHARE for part in self.shares)


@dataclass
class Used:
    """A leg's use of one change of sharding: the columns that add up to it."""

    leg: Leg
    columns: list[int]


@dataclass
class Columns:
    """The columns and rows of a model.

    left     the options of each class;  pairs  which forms may go together, by group and leg: where it is missing, all
    moments  positions at which memory is bounded by `budget` bytes
    """

    model: Model
    memory: Memory
    left: Sequence[Numbers]
    pairs: Mapping[tuple[int, int], NDArray[np.bool_]] = field(default_factory=dict)
    moments: Sequence[int] = ()
    budget: float = np.inf

    def __post_init__(self) -> None:
        self.part = 1.0 / max(1.0, self.budget) if self.moments else 1.0
        """Bytes are solved as parts of the budget."""
        self.cost: list[float] = []
        self.rows: list[tuple[float, float]] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.held = [dict[int, float]() for _ in self.moments]
        self.first: list[int] = []
        for number, own in enumerate(self.model.own):
            self.first.append(len(self.cost))
            columns = [self._column(own[option]) for option in self.left[number]]
            self._row(1.0, 1.0, [(column, 1.0) for column in columns])
            for row in self.held:
                for column, option in zip(columns, self.left[number], strict=True):
                    _plus(row, column, self.memory.stored[number][option])
        self.options = len(self.cost)
        for at, group in enumerate(self.model.groups):
            self._group(at, group)
        for row in self.held:
            most = (self.budget - self.memory.fixed) * self.part
            self._row(-np.inf, most, [(column, size * self.part) for column, size in sorted(row.items())])

    def _column(self, cost: float = 0.0) -> int:
        self.cost.append(float(cost))
        return len(self.cost) - 1

    def _row(self, least: float, most: float, entries: Sequence[tuple[int, float]]) -> None:
        at = len(self.rows)
        self.rows.append((least, most))
        for column, value in entries:
            self.entries[0].append(at)
            self.entries[1].append(column)
            self.entries[2].append(value)

    def _by_form(self, number: int, forms: Numbers) -> dict[int, list[int]]:
        """The columns of a class's options, by the form that they give or want, forms in order."""
        found: dict[int, list[int]] = {int(form): [] for form in np.unique(forms[self.left[number]])}
        for at, option in enumerate(self.left[number]):
            found[int(forms[option])].append(self.first[number] + at)
        return found

    def _group(self, number: int, group: Group) -> None:
        lies = self._by_form(group.maker, group.given)
        for row, moment in zip(self.held, self.moments, strict=True):
            alive = self.memory.held_at(moment, group)
            for form, columns in lies.items():
                if alive and not group.lies[form][1]:
                    for column in columns:
                        _plus(row, column, alive * group.held[form])
        used: dict[tuple[int, int, str], list[Used]] = {}
        for at, leg in enumerate(group.legs):
            pairs = self._own_pairs(group, leg) if leg.reader == group.maker else self._pairs((number, at), group, leg, lies)
            for (a, b), columns in pairs.items():
                if group.lies[a] != group.wants[b]:
                    used.setdefault((a, b, leg.phase if leg.gathers[a, b] else ""), []).append(Used(leg, columns))
        for (a, b, _), legs in used.items():
            self._change(group, a, b, legs)

    def _own_pairs(self, group: Group, leg: Leg) -> dict[tuple[int, int], list[int]]:
        """Of a leg whose reader decides with the maker: its options."""
        found: dict[tuple[int, int], list[int]] = {}
        for at, option in enumerate(self.left[group.maker]):
            found.setdefault((int(group.given[option]), int(leg.forms[option])), []).append(self.first[group.maker] + at)
        return found

    def _pairs(self, key: tuple[int, int], group: Group, leg: Leg, lies: dict[int, list[int]]) -> dict[tuple[int, int], list[int]]:
        wants = self._by_form(leg.reader, leg.forms)
        if not self.moments and not leg.price[np.ix_(list(lies), list(wants))].any():
            return {}
        allowed = self.pairs.get(key)
        found = {
            (a, b): [self._column()]
            for row, a in enumerate(lies) for column, b in enumerate(wants) if allowed is None or allowed[row, column]
        }  # fmt: skip
        starts: dict[int, list[tuple[int, float]]] = {a: [(column, -1.0) for column in columns] for a, columns in lies.items()}
        ends: dict[int, list[tuple[int, float]]] = {b: [(column, -1.0) for column in columns] for b, columns in wants.items()}
        for (a, b), (column,) in found.items():
            starts[a].append((column, 1.0))
            ends[b].append((column, 1.0))
        for entries in (*starts.values(), *ends.values()):
            self._row(0.0, 0.0, entries)
        return found

    def _change(self, group: Group, a: int, b: int, used: list[Used]) -> None:
        """One change of sharding, by one leg or by several that share it."""
        price = min(one.leg.price[a, b] for one in used) * group.count
        if price:
            for column in used[0].columns if len(used) == 1 else [self._shared([(one, 1.0) for one in used])]:
                self.cost[column] += price
        for row, moment in zip(self.held, self.moments, strict=True):
            everyone = self.memory.brought_at(moment, group, [one.leg for one in used], a, b)
            if everyone:
                for column in used[0].columns if len(used) == 1 else [self._alive(moment, group, a, b, used, everyone)]:
                    _plus(row, column, everyone * group.brought[b])

    def _shared(self, used: Sequence[tuple[Used, float]]) -> int:
        """A column that is at least each of these, times its part."""
        found = self._column()
        for one, part in used:
            self._row(0.0, np.inf, [(found, 1.0), *((column, -part) for column in one.columns)])
        return found

    def _alive(self, moment: int, group: Group, a: int, b: int, used: list[Used], everyone: float) -> int:
        """How much of what all legs together keep alive at a moment those do that use the change: alone, or two together."""
        alone = [self.memory.brought_at(moment, group, [one.leg], a, b) / everyone for one in used]
        found = self._shared([(one, part) for one, part in zip(used, alone, strict=True) if part])
        for (one, mine), (other, its) in combinations(zip(used, alone, strict=True), 2):
            both = self.memory.brought_at(moment, group, [one.leg, other.leg], a, b) / everyone
            if both > max(mine, its):
                self._row(-both, np.inf, [(found, 1.0), *((column, -both) for column in (*one.columns, *other.columns))])
        return found

    # -------------------------------------------------------------------------------------------------------------------------- solved

    @property
    def matrix(self) -> csr_matrix:
        rows, columns, values = self.entries
        return csr_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.cost)))

    def relaxed(self) -> Relaxed | None:
        """The linear relaxation; None if not even that keeps the budget."""
        matrix, least, most = self.matrix, np.array([row[0] for row in self.rows]), np.array([row[1] for row in self.rows])
        equal = least == most
        above, below = ~equal & np.isfinite(least), ~equal & np.isfinite(most)
        limits = np.concatenate([-least[above], most[below]])
        found = linprog(
            np.array(self.cost) * MILLI, vstack([-matrix[above], matrix[below]]) if len(limits) else None, limits if len(limits) else None,
            matrix[equal], least[equal], bounds=(0, 1), method="highs", options={"maxiter": ITERATIONS},
        )  # fmt: skip
        if found.status == 2:
            return None
        assert found.status == 0, found.message
        weights = -found.ineqlin.marginals[len(limits) - len(self.moments) :] * self.part / MILLI if self.moments else ()
        return Relaxed(float(found.fun) / MILLI, self._of_classes(found.x), tuple(map(float, weights)))

    def whole(self, nodes: int = NODES, gap: float = GAP) -> tuple[Pick | None, float | None]:
        """An integer choice by branch and bound, and its bound; no choice where none was found."""
        integral = np.zeros(len(self.cost))
        integral[: self.options] = 1
        least, most = np.array([row[0] for row in self.rows]), np.array([row[1] for row in self.rows])
        found = milp(
            np.array(self.cost) * MILLI, integrality=integral, bounds=Bounds(0, 1), constraints=LinearConstraint(self.matrix, least, most),
            options={"node_limit": nodes, "mip_rel_gap": gap},
        )  # fmt: skip
        bound = None if found.mip_dual_bound is None else float(found.mip_dual_bound) / MILLI
        return None if found.x is None else self.rounded(self._of_classes(found.x)), bound

    def _of_classes(self, values: Floats) -> tuple[Floats, ...]:
        return tuple(values[start : start + len(row)] for start, row in zip(self.first, self.left, strict=True))

    def rounded(self, shares: Sequence[Floats]) -> Pick:
        """Of each class the option of which there is most."""
        return tuple(int(row[int(np.argmax(part))]) for row, part in zip(self.left, shares, strict=True))


def _plus(row: dict[int, float], column: int, value: float) -> None:
    if value:
        row[column] = row.get(column, 0.0) + float(value)
