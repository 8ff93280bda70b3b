"""Costs of one class's options given other decisions, and choices decoded from messages or improved a class at a time (coordinate descent).

Classes are decided in graph order, each by its cost given the classes already decided and by messages for the others. Then each class takes
its best option given all others, until none changes. The cost of a class's options is exact, shared changes of sharding included; where
memory has a price, a resharded form counts once, for the reader that keeps it alive longest. Alternatives to a decision
(`alternatives.py`) and ties (`plan_search.py`) are priced by the same costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import numpy as np

from meshc.passes.planner.cost_model import Leg, Pick
from meshc.passes.planner.dual_ascent import Edge, Side
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.search_space import MARGIN, Floats, Numbers

OPEN: Final = -1
"""In place of an option: the class is not decided."""


class Descent:
    """
    left   by class: options that it may take;  edges  with the messages of undecided classes
    makes  by class: groups of the values that it makes;  reads  groups of those that it reads, with the legs
    """

    def __init__(self, weighed: Lagrangian, left: Sequence[Numbers], edges: Iterable[Edge] = ()) -> None:
        self.left, self.groups, self.price = left, weighed.model.groups, weighed.price
        self.plain = [own[row] for own, row in zip(weighed.plain, left, strict=True)]
        self.messages: dict[tuple[int, int], tuple[Side, Side]] = {(e.group, e.leg): (e.maker, e.reader) for e in edges}
        self.makes: list[list[int]] = [[] for _ in left]
        self.reads: list[dict[int, list[int]]] = [{} for _ in left]
        for number, group in enumerate(self.groups):
            self.makes[group.maker].append(number)
            for at, leg in enumerate(group.legs):
                if leg.reader != group.maker:
                    self.reads[leg.reader].setdefault(number, []).append(at)

    def decide(self) -> Pick:
        pick = [OPEN] * len(self.left)
        for number in range(len(pick)):
            pick[number] = int(self.left[number][self.costs(number, pick).argmin()])
        return tuple(pick)

    def improve(self, start: Sequence[int], fixed: int | None = None, fits: Callable[[Pick], bool] | None = None) -> Pick:
        """The choice `start`, improved; around the class `fixed`, if given, which keeps its option; among choices
        that fit, if `fits` is given. (Costs where memory has a price are not exact: a choice that comes again is the end.)"""
        pick, seen = tuple(start), {tuple(start)}
        waiting = dict.fromkeys(range(len(pick)) if fixed is None else self._neighbours(fixed))
        while waiting:
            number = next(iter(waiting))
            del waiting[number]
            better = next((one for one in self._better_options(number, pick, fits is None) if fits is None or fits(one)), None)
            if better in seen:
                break
            if better is not None:
                seen.add(pick := better)
                waiting.update(dict.fromkeys(other for other in self._neighbours(number) if other != fixed))
        return pick

    def _better_options(self, number: int, pick: Pick, best_alone: bool) -> Iterator[Pick]:
        """Choices in which one class has an option of lower cost, the lowest first."""
        costs, left = self.costs(number, pick), self.left[number]
        now = np.flatnonzero(left == pick[number])
        for option in [costs.argmin()] if best_alone else costs.argsort(kind="stable"):
            if len(now) and costs[option] * (1 + MARGIN) >= costs[now[0]]:
                return
            yield (*pick[:number], int(left[option]), *pick[number + 1 :])

    def _neighbours(self, number: int) -> Iterable[int]:
        for group in self.makes[number]:
            yield from (leg.reader for leg in self.groups[group].legs if leg.reader != number)
        for group in self.reads[number]:
            yield self.groups[group].maker
            yield from (leg.reader for leg in self.groups[group].legs if leg.reader != number)

    # ------------------------------------------------------------------------------------------------------------------ one class's options

    def costs(self, number: int, pick: Sequence[int]) -> Floats:
        """Cost of each option that is left, exact for decided neighbours and by messages for the others."""
        found = self.plain[number].copy()
        for group in self.makes[number]:
            found += self._maker_costs(group, number, pick)
        for group, legs in self.reads[number].items():
            found += self._reader_costs(group, legs, number, pick)
        return found

    def _maker_costs(self, number: int, maker: int, pick: Sequence[int]) -> Floats:
        group, left = self.groups[number], self.left[maker]
        given = group.given[left]
        found = np.zeros(len(left))
        decided: dict[int, dict[str, int]] = {}
        for at, leg in enumerate(group.legs):
            if leg.reader == maker:
                continue
            if pick[leg.reader] == OPEN:
                found += self._message(number, at, 0)
            else:
                decided.setdefault(int(leg.forms[pick[leg.reader]]), {}).setdefault(leg.phase, at)
        for want, phases in decided.items():
            legs = list(phases.values())
            column = self.price[number][legs[0]][:, want]
            for at in legs[1:]:
                more = self.price[number][at][:, want]
                column = np.where(group.legs[0].gathers[:, want], column + more, np.maximum(column, more))
            found += column[given]
        before: list[tuple[Leg, object]] = []
        for at, leg in enumerate(group.legs):
            if leg.reader == maker:
                wants = leg.forms[left]
                gathers = leg.gathers[given, wants]
                paid = np.zeros(len(left), dtype=bool)
                for want, phases in decided.items():
                    paid |= (wants == want) & (~gathers | (leg.phase in phases))
                for other, others in before:
                    paid |= (wants == others) & (~gathers | (leg.phase == other.phase))
                found += np.where(paid, 0.0, self.price[number][at][given, wants])
                before.append((leg, wants))
        return found

    def _reader_costs(self, number: int, legs: Sequence[int], reader: int, pick: Sequence[int]) -> Floats:
        group, left = self.groups[number], self.left[reader]
        found = np.zeros(len(left))
        if pick[group.maker] == OPEN:
            for at in legs:
                found += self._message(number, at, 1)
            return found
        given = int(group.given[pick[group.maker]])
        for at in legs:
            leg = group.legs[at]
            row = self.price[number][at][given].copy()
            for other_at, other in enumerate(group.legs):
                if other.reader != reader and pick[other.reader] != OPEN:
                    want = int(other.forms[pick[other.reader]])
                    if other.phase == leg.phase or not leg.gathers[given, want]:
                        row[want] = max(0.0, row[want] - self.price[number][other_at][given, want])
            wants = leg.forms[left]
            paid = np.zeros(len(left), dtype=bool)
            for other_at in legs[: legs.index(at)]:
                other = group.legs[other_at]
                paid |= (other.forms[left] == wants) & (~leg.gathers[given, wants] | (other.phase == leg.phase))
            found += np.where(paid, 0.0, row[wants])
        return found

    def _message(self, number: int, leg: int, side: int) -> Floats:
        sides = self.messages.get((number, leg))
        if sides is None:
            return np.zeros(1)
        return sides[side].message[sides[side].at]
