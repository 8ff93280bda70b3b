"""Lower bound, shares and duals by a linear relaxation of a search, and a choice by branch and bound (HiGHS, by scipy).

Columns, each in [0, 1]: an option of a class; for a leg, a pair of a given and a wanted form; a change of sharding that several legs share;
a form that several legs keep alive at a moment. Rows: each class takes one option; the pairs of a leg with one given form add up to the
options that give it, those with one wanted form to the options that want it; a shared change is at least each leg's use of it; bytes of a
rank at some moments are within the budget.

Limits are iterations, nodes, a gap or an allowance of rows times columns, never seconds: one version of scipy gives one answer on every
machine. (A limit of nodes does not end branch and bound soon, since cuts and other programs come before the first node; the size of its
program does.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshc.lazy_module import LazyModule
from meshc.passes.planner.cost_model import CostModel, Leg, Pick, ValueGroup
from meshc.passes.planner.dual_ascent import Charges
from meshc.passes.planner.linear_program import EXACT, UnsolvedProgram, solve_program
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.search_space import Floats, Numbers

if TYPE_CHECKING:
    from scipy import optimize, sparse
else:
    optimize, sparse = LazyModule("scipy.optimize"), LazyModule("scipy.sparse")

MILLI: Final = 1e3
"""Seconds are solved as milliseconds: tolerances of solvers are absolute."""
ENOUGH: Final = 5e-3
"""Relative gap at which searches and branch and bound end; difference in bytes that is not looked for; part of the gap that a sweep after a
program must take. (With 0.01 CLIP on three axes takes 3/4 of the seconds, and twenty of the zoo's 153 searches leave up to 0.84 %.)"""
BRANCHES: Final = 10
"""Linear programs of the same size that a run of branch and bound counts for, with memory and nodes to spare: 3 to 9 s for 1e8 rows times
columns, of which a linear program takes 1 s at most."""


@dataclass
class Allowance:
    """Remaining work of a search, and of searches that follow it for changes of the request.

    left        rows times columns of linear programs within budgets, all together: 20 to 40 CPU seconds
    candidates  choices that may go through all passes: four programs at most, in seven rows of the plan tables
    """

    left: float = 4e9
    candidates: int = 18

    def take_candidate(self) -> bool:
        """Counts one more choice that goes through all passes; returns whether it may."""
        self.candidates -= 1
        return self.candidates >= 0

    def spend(self, columns: ProgramColumns, times: int = 1) -> bool:
        """Whether `times` programs of this size are within the allowance, which is then less by as much."""
        size = float(len(columns.rows)) * len(columns.cost) * times
        if size > self.left:
            return False
        self.left -= size
        return True

    @contextmanager
    def half(self) -> Iterator[Allowance]:
        """Half of the allowance left, for one question; the rest of it is returned."""
        own = Allowance(self.left / 2)
        given = own.left
        yield own
        self.left -= given - own.left


@dataclass(frozen=True)
class Relaxation:
    """
    bound    lower bound in seconds on choices of the given options and pairs
    shares   by class: share of each option
    weights  by moment: seconds per byte
    charges  by group and leg: duals of its rows
    """

    bound: float
    shares: tuple[Floats, ...]
    weights: tuple[float, ...]
    charges: Mapping[tuple[int, int], Charges]

    @property
    def is_integral(self) -> bool:
        return all(part.max() > 1 - EXACT for part in self.shares)


Pairs: TypeAlias = tuple[Numbers, Numbers, Numbers]
"""(given forms, wanted forms, columns) of pairs of forms."""
NONE: Final = np.zeros(0, dtype=np.int64)
NOWHERE: Final = -1


@dataclass
class ChangeUse:
    """Use of one change of sharding by a leg: the sum of these columns."""

    leg: Leg
    columns: list[int]


@dataclass(frozen=True)
class AliveShares:
    """Liveness at a moment of a form that legs share.

    everyone  number of the group's values that all legs together keep alive
    alone     by leg: part of `everyone` that the leg by itself keeps alive
    both      (leg, leg, part) where two together keep more alive than each
    """

    everyone: float
    alone: tuple[float, ...] = ()
    both: tuple[tuple[int, int, float], ...] = ()


@dataclass
class ProgramColumns:
    """Columns and rows of a model.

    left     by class: options;  pairs  by group and leg: mask of allowed pairs of forms, all if missing
    moments  positions at which memory is bounded by `budget` bytes
    near     charges from which those of the solution differ by at most `reach` seconds; the bound is then somewhat lower
    """

    model: CostModel
    memory: MemoryModel
    left: Sequence[Numbers]
    pairs: Mapping[tuple[int, int], NDArray[np.bool_]] = field(default_factory=dict)
    moments: Sequence[int] = ()
    budget: float = np.inf
    near: Mapping[tuple[int, int], Charges] = field(default_factory=dict)
    reach: float = np.inf

    def __post_init__(self) -> None:
        self.part = 1.0 / max(1.0, self.budget) if self.moments else 1.0
        """Bytes are solved as parts of the budget."""
        self.cost: list[float] = []
        self.rows: list[tuple[float, float]] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.held = [dict[int, float]() for _ in self.moments]
        self.first: list[int] = []
        self._kept: dict[tuple[tuple[int, ...], ...], list[AliveShares]] = {}
        """Of the current group, by readings of legs; the last number says whether the given form is partial."""
        self.legs: dict[tuple[int, int], tuple[int, Numbers, Numbers]] = {}
        """By group and leg with pairs: first row, given forms and wanted forms of its rows."""
        for number, own in enumerate(self.model.own):
            self.first.append(len(self.cost))
            columns = [self._column(own[option]) for option in self.left[number]]
            self._row(1.0, 1.0, [(column, 1.0) for column in columns])
            for row in self.held:
                for column, option in zip(columns, self.left[number], strict=True):
                    _add_entry(row, column, self.memory.stored[number][option])
        self.options = len(self.cost)
        for at, group in enumerate(self.model.groups):
            self._group(at, group)
        for row in self.held:
            most = (self.budget - self.memory.fixed) * self.part
            self._row(-np.inf, most, [(column, size * self.part) for column, size in sorted(row.items())])

    def _column(self, cost: float = 0.0) -> int:
        self.cost.append(float(cost))
        return len(self.cost) - 1

    def _columns(self, costs: Floats) -> Numbers:
        self.cost += costs.tolist()
        return len(self.cost) - len(costs) + np.arange(len(costs))

    def _enter(self, rows: Numbers, columns: Numbers, value: float) -> None:
        self.entries[0].extend(rows.tolist())
        self.entries[1].extend(columns.tolist())
        self.entries[2].extend([value] * len(rows))

    def _row(self, least: float, most: float, entries: Sequence[tuple[int, float]]) -> None:
        at = len(self.rows)
        self.rows.append((least, most))
        for column, value in entries:
            self.entries[0].append(at)
            self.entries[1].append(column)
            self.entries[2].append(value)

    def _forms(self, number: int, forms: Numbers) -> tuple[Numbers, Numbers]:
        """Distinct forms that a class's options give or want, in order, and by option the index of its form."""
        return np.unique(forms[self.left[number]], return_inverse=True)

    def _group(self, number: int, group: ValueGroup) -> None:
        lies = self._forms(group.maker, group.given)
        for row, moment in zip(self.held, self.moments, strict=True):
            alive = self.memory.held_at(moment, group)
            for at, form in enumerate(lies[0][lies[1]].tolist()) if alive else ():
                if not group.lies[form][1]:
                    _add_entry(row, self.first[group.maker] + at, alive * group.held[form])
        same = {form: at for at, form in enumerate(group.wants)}
        stays = np.array([same.get(form, NOWHERE) for form in group.lies])
        found = [
            self._own_pairs(group, leg) if leg.reader == group.maker else self._pairs((number, at), group, leg, *lies)
            for at, leg in enumerate(group.legs)
        ]  # fmt: skip
        moved = [stays[rows] != forms for rows, forms, _ in found]
        if not self.moments and len(group.legs) == 1 and group.legs[0].reader != group.maker:
            (rows, forms, columns), (changes,) = found[0], moved
            costs = group.legs[0].price[rows[changes], forms[changes]] * group.count
            for column, cost in zip(columns[changes].tolist(), costs.tolist(), strict=True):
                self.cost[column] += cost
            return
        used: dict[tuple[int, int, str], list[ChangeUse]] = {}
        for leg, (rows, forms, columns), changes in zip(group.legs, found, moved, strict=True):
            alike: dict[tuple[int, int], list[int]] = {}
            for a, b, column in zip(rows[changes].tolist(), forms[changes].tolist(), columns[changes].tolist(), strict=True):
                alike.setdefault((a, b), []).append(column)
            for (a, b), each in alike.items():
                used.setdefault((a, b, leg.phase if leg.gathers[a, b] else ""), []).append(ChangeUse(leg, each))
        self._kept.clear()
        for (a, b, _), legs in used.items():
            self._change(group, a, b, legs)

    def _own_pairs(self, group: ValueGroup, leg: Leg) -> Pairs:
        """Pairs of a leg with one class at both ends: its options."""
        left = self.left[group.maker]
        return group.given[left], leg.forms[left], self.first[group.maker] + np.arange(len(left))

    def _pairs(self, key: tuple[int, int], group: ValueGroup, leg: Leg, lies: Numbers, given: Numbers) -> Pairs:
        wants, wanted = self._forms(leg.reader, leg.forms)
        if not self.moments and not leg.price[np.ix_(lies, wants)].any():
            return NONE, NONE, NONE
        allowed = self.pairs.get(key)
        rows, places = np.nonzero(np.ones((len(lies), len(wants)), dtype=bool) if allowed is None else allowed)
        columns = self._columns(np.zeros(len(rows)))
        first = len(self.rows)
        self.legs[key] = first, lies, wants
        self.rows += [(0.0, 0.0)] * (len(lies) + len(wants))
        for side, number, options, of_pairs in ((first, group.maker, given, rows), (first + len(lies), leg.reader, wanted, places)):
            self._enter(side + options, self.first[number] + np.arange(len(options)), -1.0)
            self._enter(side + of_pairs, columns, 1.0)
        for side, forms, (known, charged) in zip((first, first + len(lies)), (lies, wants), self.near.get(key, ()), strict=False):
            place = np.searchsorted(forms, known)
            there = np.flatnonzero(forms[np.minimum(place, len(forms) - 1)] == known)
            for sign in (1.0, -1.0):
                self._enter(side + place[there], self._columns(self.reach + sign * charged[there]), sign)
        return lies[rows], wants[places], columns

    def _change(self, group: ValueGroup, a: int, b: int, used: list[ChangeUse]) -> None:
        """Adds the seconds and bytes of one change of sharding, by one leg or shared by several."""
        price = min(one.leg.price[a, b] for one in used) * group.count
        if price:
            for column in used[0].columns if len(used) == 1 else [self._shared_column([(one, 1.0) for one in used])]:
                self.cost[column] += price
        for row, alive in zip(self.held, self._alive_shares(group, used, bool(group.lies[a][1])), strict=True):
            if alive.everyone:
                for column in used[0].columns if len(used) == 1 else [self._alive_column(used, alive)]:
                    _add_entry(row, column, alive.everyone * group.brought[b])

    def _shared_column(self, used: Sequence[tuple[ChangeUse, float]]) -> int:
        """A column that is at least each use, times its part."""
        found = self._column()
        for one, part in used:
            self._row(0.0, np.inf, [(found, 1.0), *((column, -part) for column in one.columns)])
        return found

    def _alive_column(self, used: Sequence[ChangeUse], alive: AliveShares) -> int:
        """Column of the part of `alive.everyone` that legs with the change keep alive, each by itself or two together."""
        found = self._shared_column([(one, part) for one, part in zip(used, alive.alone, strict=True) if part])
        for one, other, both in alive.both:
            columns = (*used[one].columns, *used[other].columns)
            self._row(-both, np.inf, [(found, 1.0), *((column, -both) for column in columns)])
        return found

    def _alive_shares(self, group: ValueGroup, used: Sequence[ChangeUse], partial: bool) -> list[AliveShares]:
        """Alive shares at each moment."""
        key = *(one.leg.readings for one in used), (int(partial),)
        if key not in self._kept:
            self._kept[key] = [self._alive_at(moment, group, [one.leg for one in used], partial) for moment in self.moments]
        return self._kept[key]

    def _alive_at(self, moment: int, group: ValueGroup, legs: Sequence[Leg], partial: bool) -> AliveShares:
        everyone = self.memory.resharded_at(moment, group, legs, partial)
        if not everyone or len(legs) == 1:
            return AliveShares(everyone)
        alone = tuple(self.memory.resharded_at(moment, group, [leg], partial) / everyone for leg in legs)
        two = [
            (one, other, self.memory.resharded_at(moment, group, [legs[one], legs[other]], partial) / everyone)
            for one, other in combinations(range(len(legs)), 2)
        ]  # fmt: skip
        return AliveShares(everyone, alone, tuple(each for each in two if each[2] > max(alone[each[0]], alone[each[1]])))

    # ------------------------------------------------------------------------------------------------------------------------ solution

    @property
    def matrix(self) -> sparse.csr_matrix:
        rows, columns, values = self.entries
        return sparse.csr_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.cost)))

    def solve_relaxation(self) -> Relaxation | None:
        """The linear relaxation; None if it is infeasible or unsolved. (Columns have no upper limit: that of 1 follows from the rows, and
        one of its own would take part of their duals.)"""
        matrix, least, most = self.matrix, np.array([row[0] for row in self.rows]), np.array([row[1] for row in self.rows])
        equal = least == most
        above, below = ~equal & np.isfinite(least), ~equal & np.isfinite(most)
        limits = np.concatenate([-least[above], most[below]])
        try:
            found = solve_program(
                np.array(self.cost) * MILLI, sparse.vstack([-matrix[above], matrix[below]]) if len(limits) else None,
                limits if len(limits) else None, matrix[equal], least[equal], bounds=(0, None),
            )  # fmt: skip
        except UnsolvedProgram:
            return None
        if found is None:
            return None
        weights = -found.ineqlin.marginals[len(limits) - len(self.moments) :] * self.part / MILLI if self.moments else ()
        charged = np.zeros(len(self.rows))
        charged[equal] = found.eqlin.marginals / MILLI
        return Relaxation(float(found.fun) / MILLI, self._of_classes(found.x), tuple(map(float, weights)), self._charges(charged))

    def _charges(self, charged: Floats) -> dict[tuple[int, int], Charges]:
        found: dict[tuple[int, int], Charges] = {}
        for key, (first, given, wanted) in self.legs.items():
            middle, last = first + len(given), first + len(given) + len(wanted)
            found[key] = (given, charged[first:middle]), (wanted, charged[middle:last])
        return found

    def solve_integer(self) -> tuple[Pick | None, float | None]:
        """A choice by branch and bound at its first node, None if none was found, and a lower bound in seconds. (Fifty nodes find the same
        choices for CLIP, in as many seconds.)"""
        integral = np.zeros(len(self.cost))
        integral[: self.options] = 1
        least, most = np.array([row[0] for row in self.rows]), np.array([row[1] for row in self.rows])
        found = optimize.milp(
            np.array(self.cost) * MILLI, integrality=integral, bounds=optimize.Bounds(0, 1),
            constraints=optimize.LinearConstraint(self.matrix, least, most),
            options={"node_limit": 1, "mip_rel_gap": ENOUGH},
        )  # fmt: skip
        bound = None if found.mip_dual_bound is None else float(found.mip_dual_bound) / MILLI
        return None if found.x is None else self.round_shares(self._of_classes(found.x)), bound

    def _of_classes(self, values: Floats) -> tuple[Floats, ...]:
        return tuple(values[start : start + len(row)] for start, row in zip(self.first, self.left, strict=True))

    def round_shares(self, shares: Sequence[Floats]) -> Pick:
        """By class: the option of the largest share."""
        return tuple(int(row[int(np.argmax(part))]) for row, part in zip(self.left, shares, strict=True))


def _add_entry(row: dict[int, float], column: int, value: float) -> None:
    if value:
        row[column] = row.get(column, 0.0) + float(value)
