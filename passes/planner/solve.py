"""The model solved: a linear relaxation, rounded, repaired, and closed by branch and bound. (HiGHS, by scipy.)

Columns, each in [0, 1]: an option of a class; for a leg, a pair of the form that is given and the form that is wanted; a change of
sharding that several legs share. Rows: each class takes one option; a leg's pairs that begin with a form add up to the options that give
it, those that end with one to the options that want it; a shared change is there for each leg that uses it; what a rank holds at some
moments is within the budget.

Everything ends by iterations, nodes or a gap, never by seconds: one version of scipy gives one answer on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_matrix, vstack

from meshc.passes.planner.memory import Memory
from meshc.passes.planner.model import Floats, Group, Leg, Model, Pick

MILLI: Final = 1e3
"""Seconds are solved as milliseconds: tolerances of solvers are absolute."""
ITERATIONS: Final = 2_000_000
NODES: Final = 200
GAP: Final = 1e-3


@dataclass(frozen=True)
class Relaxed:
    """
    bound   no choice costs less (seconds), within the options that were given
    shares  of each class, how much of each option the relaxation takes
    """

    bound: float
    shares: tuple[Floats, ...]


class Columns:
    """The columns and rows of a model, some options of each class given. `moments` are positions at which memory is bounded."""

    def __init__(
        self, model: Model, memory: Memory, keep: Sequence[Sequence[int]], moments: Sequence[int] = (), budget: float | None = None,
        weight: float = 0.0,
    ) -> None:  # fmt: skip
        """`budget` in bytes; where there is none, a byte at one of the moments costs `weight` seconds."""
        self.model, self.memory, self.moments = model, memory, list(moments)
        self.keep = [list(row) for row in keep]
        self.cost: list[float] = []
        self.rows: list[tuple[float, float]] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.held = [dict[int, float]() for _ in self.moments]
        self.first: list[int] = []
        for number, own in enumerate(model.own):
            self.first.append(len(self.cost))
            columns = [self._column(own[option]) for option in self.keep[number]]
            self._row(1.0, 1.0, [(column, 1.0) for column in columns])
            for row in self.held:
                for column, option in zip(columns, self.keep[number], strict=True):
                    _plus(row, column, memory.stored[number][option])
        self.options = len(self.cost)
        for group in model.groups:
            self._group(group)
        for row in self.held:
            if budget is None:
                for column, size in row.items():
                    self.cost[column] += weight * size
            else:
                self._row(-np.inf, (budget - memory.fixed) / 1e9, [(column, size / 1e9) for column, size in sorted(row.items())])

    def _column(self, cost: float) -> int:
        self.cost.append(float(cost))
        return len(self.cost) - 1

    def _row(self, least: float, most: float, entries: Sequence[tuple[int, float]]) -> None:
        at = len(self.rows)
        self.rows.append((least, most))
        for column, value in entries:
            self.entries[0].append(at)
            self.entries[1].append(column)
            self.entries[2].append(value)

    def _by_form(self, number: int, forms: Sequence[int]) -> dict[int, list[int]]:
        """The columns of a class's options, by the form that they give or want."""
        found: dict[int, list[int]] = {}
        for at, option in enumerate(self.keep[number]):
            found.setdefault(int(forms[option]), []).append(self.first[number] + at)
        return found

    def _group(self, group: Group) -> None:
        lies = self._by_form(group.maker, group.given)  # type: ignore[arg-type]
        for at, moment in enumerate(self.moments):
            alive = self.memory.held_at(moment, group)
            for form, columns in lies.items():
                if alive and not group.lies[form][1]:
                    for column in columns:
                        _plus(self.held[at], column, alive * group.held[form])
        shared: dict[tuple[int, int, str], list[tuple[Leg, int]]] = {}
        for leg in group.legs:
            if leg.reader == group.maker:
                self._alone(group, leg)
                continue
            wants = self._by_form(leg.reader, leg.forms)  # type: ignore[arg-type]
            if not self._matters(group, leg, lies, wants):
                continue
            pairs = {(a, b): self._column(0.0) for a in lies for b in wants}
            for a, columns in lies.items():
                self._row(0.0, 0.0, [*((pairs[a, b], 1.0) for b in wants), *((column, -1.0) for column in columns)])
            for b, columns in wants.items():
                self._row(0.0, 0.0, [*((pairs[a, b], 1.0) for a in lies), *((column, -1.0) for column in columns)])
            for (a, b), column in pairs.items():
                if group.lies[a] != group.wants[b]:
                    shared.setdefault((a, b, leg.phase if leg.gathers[a, b] else ""), []).append((leg, column))
        for (a, b, _), used in shared.items():
            self._change(group, a, b, used)

    def _matters(self, group: Group, leg: Leg, lies: dict[int, list[int]], wants: dict[int, list[int]]) -> bool:
        return bool(np.any(leg.price[np.ix_(list(lies), list(wants))] > 0)) or bool(self.moments)

    def _change(self, group: Group, a: int, b: int, used: list[tuple[Leg, int]]) -> None:
        """One change of sharding, by one leg or by several that share it."""
        price = used[0][0].price[a, b] * group.count
        alive = [self.memory.brought_at(moment, group, [leg for leg, _ in used], a, b) for moment in self.moments]
        if not price and not any(alive):
            return
        column = used[0][1]
        if len(used) > 1:
            column = self._column(0.0)
            for _, own in used:
                self._row(0.0, np.inf, [(column, 1.0), (own, -1.0)])
        self.cost[column] += price
        for row, count in zip(self.held, alive, strict=True):
            _plus(row, column, count * group.brought[b])

    def _alone(self, group: Group, leg: Leg) -> None:
        """A leg whose reader decides with the maker."""
        for at, option in enumerate(self.keep[group.maker]):
            a, b = int(group.given[option]), int(leg.forms[option])
            column = self.first[group.maker] + at
            self.cost[column] += leg.price[a, b] * group.count
            if group.lies[a] != group.wants[b]:
                for row, moment in zip(self.held, self.moments, strict=True):
                    _plus(row, column, self.memory.brought_at(moment, group, [leg], a, b) * group.brought[b])

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
        shares = tuple(
            np.asarray(found.x[start : start + len(row)]) for start, row in zip(self.first, self.keep, strict=True)
        )
        return Relaxed(float(found.fun) / MILLI, shares)

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
        if found.x is None:
            return None, bound
        return self.rounded([found.x[start : start + len(row)] for start, row in zip(self.first, self.keep, strict=True)]), bound

    def rounded(self, shares: Sequence[Floats]) -> Pick:
        """Of each class the option of which there is most."""
        return tuple(row[int(np.argmax(part))] for row, part in zip(self.keep, shares, strict=True))


def _plus(row: dict[int, float], column: int, value: float) -> None:
    if value:
        row[column] = row.get(column, 0.0) + float(value)
