"""Lower bound on every choice by dual ascent: messages between classes, and the least cost of each option above the bound.

Each leg sends its maker's class a message for each given form, and its reader's class one for each wanted form. The sum of both is at most
the price of the change of sharding; legs that share a change share its price:

    sum over legs of max(0, to_maker[a] + to_reader[b])  <=  price[a, b]                  to_maker, to_reader: of any sign

Then the sum over classes of the least (own + messages) is a lower bound. A sweep visits the classes in graph order and back: each takes all
that is left of the price of legs behind it, and gives the excess of its options over the least to the legs ahead, in equal shares. The
bound never falls. (Kolmogorov: Convergent tree-reweighted message passing, PAMI 28(10), 2006; for shared changes this is the dual ascent of
facility location: Erlenkotter, Operations Research 26(6), 1978.)

An option that raises the bound above the cost of a known choice is in no better choice: it is dropped, and sweeps become shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from meshc.passes.planner.cost_model import ValueGroup
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.search_space import Floats, Numbers

Charges: TypeAlias = "tuple[tuple[Numbers, Floats], ...]"
"""Messages of a leg, seconds that it charges: the maker for given forms (forms, seconds), and the reader for wanted forms likewise."""


@dataclass
class Side:
    """One end of a leg.

    number  its class;  forms  forms of the group that options of the class give or want
    at      by option: index in `forms`;  message  by form
    """

    number: int
    forms: Numbers
    at: Numbers
    message: Floats

    def __post_init__(self) -> None:
        self.order = np.argsort(self.at, kind="stable")
        counts = np.bincount(self.at, minlength=len(self.forms))
        self.starts = counts.cumsum() - counts

    def least(self, costs: Floats) -> Floats:
        """By form: the least of its options' costs."""
        found: Floats = np.minimum.reduceat(costs[self.order], self.starts)
        return found


@dataclass
class Edge:
    """A leg between two classes, over the options that are left.

    price    seconds by given and wanted form, `extra` included: the price of memory that this leg alone keeps alive
    share    of the price of a shared change: the part that this leg pays
    columns  of `SharedChanges.taken`: the forms that this leg wants
    mine     `taken` of its phase;  others  of other phases
    lasting  1.0 for changes that are paid once for all phases, else 0.0; None: 1.0 for all, where there are `others`
    """

    group: int
    leg: int
    maker: Side
    reader: Side
    price: Floats
    extra: Floats | None
    phase: str
    share: Floats | None = None
    columns: slice | Numbers = field(default_factory=lambda: slice(None))
    mine: Floats | None = None
    others: Sequence[Floats] = ()
    lasting: Floats | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.maker, self.reader


@dataclass
class SharedChanges:
    """Seconds that all legs of a group pay for each change, by phase. `lasting`: 1.0 for changes paid once for all phases, 0.0 for gathers,
    paid in each."""

    taken: dict[str, Floats]
    lasting: Floats


class DualAscent:
    """Messages of a weighted model over the options that are left of each class."""

    def __init__(self, weighed: Lagrangian, left: Sequence[Numbers], start: DualAscent | None = None) -> None:
        self.weighed, self.left = weighed, list(left)
        self.own = [own[row] for own, row in zip(weighed.own, self.left, strict=True)]
        self.edges: list[Edge] = []
        self.common: dict[int, SharedChanges] = {}
        for number, group in enumerate(weighed.model.groups):
            self._add_edges(number, group)
        self.late: dict[int, dict[int, Edge]] = {number: {} for number in self.common}
        self.at: list[list[tuple[Edge, Side, Side]]] = [[] for _ in self.own]
        for edge in self.edges:
            for mine, other in (edge.sides, edge.sides[::-1]):
                self.at[mine.number].append((edge, mine, other))
        self.behind = [
            [[one for one in row if (one[2].number < number) == forward] for number, row in enumerate(self.at)] for forward in (False, True)
        ]
        self.least = np.zeros(len(self.own))
        self.keep = [np.ones(len(own), dtype=bool) for own in self.own]
        if start is not None:
            self.resume(start.charges())
        self.settle()

    # ------------------------------------------------------------------------------------------------------------------------- set up

    def _add_edges(self, number: int, group: ValueGroup) -> None:
        legs = [(at, leg) for at, leg in enumerate(group.legs) if leg.reader != group.maker]
        given, given_at = np.unique(group.given[self.left[group.maker]], return_inverse=True)
        edges: list[Edge] = []
        for at, leg in legs:
            wanted, wanted_at = np.unique(leg.forms[self.left[leg.reader]], return_inverse=True)
            price = self.weighed.price[number][at][np.ix_(given, wanted)]
            more = self.weighed.extra[number][at]
            extra = None if more is None else more[np.ix_(given, wanted)]
            if price.any():
                maker = Side(group.maker, given, given_at, np.zeros(len(given)))
                reader = Side(leg.reader, wanted, wanted_at, np.zeros(len(wanted)))
                edges.append(Edge(number, at, maker, reader, price, extra, leg.phase))
        if len(edges) > 1:
            self.common[number] = self._share_changes(group, given, edges)
        self.edges += edges

    def _share_changes(self, group: ValueGroup, given: Numbers, edges: Sequence[Edge]) -> SharedChanges:
        """Sets up the sharing of changes by `edges`; each pays an equal part of the memory that several of them keep alive."""
        covering = [(edge, edge.extra) for edge in edges if edge.extra is not None]
        for edge, extra in covering:
            part = extra / len(covering)
            edge.price, edge.extra = edge.price - extra + part, part
        for edge in edges:
            edge.share = np.zeros_like(edge.price)
        shape = len(given), len(group.wants)
        gathers = group.legs[0].gathers[given]
        common = SharedChanges(
            {phase: np.zeros(shape) for phase in dict.fromkeys(edge.phase for edge in edges)}, np.where(gathers, 0.0, 1.0)
        )
        for edge in edges:
            edge.columns = _as_slice(edge.reader.forms)
            edge.mine = common.taken[edge.phase]
            lasting = common.lasting[:, edge.columns]
            if len(common.taken) > 1 and lasting.any():
                edge.others = [taken for phase, taken in common.taken.items() if phase != edge.phase]
                edge.lasting = None if lasting.all() else lasting
        return common

    def charges(self) -> dict[tuple[int, int], Charges]:
        """The messages by group and leg."""
        return {(edge.group, edge.leg): tuple((side.forms, side.message) for side in edge.sides) for edge in self.edges}

    def resume(self, charges: Mapping[tuple[int, int], Charges], missing: float = 0.0) -> None:
        """Takes over messages by group and leg, the reader's as far as there is room; those of forms without one are `missing`."""
        for edge in self.edges:
            for side, (forms, messages) in zip(edge.sides, charges.get((edge.group, edge.leg), ()), strict=False):
                place = np.minimum(np.searchsorted(forms, side.forms), len(forms) - 1)
                side.message = np.where(forms[place] == side.forms, messages[place], missing)
            edge.reader.message = np.minimum(edge.reader.message, self.room_for(edge, edge.reader))
            self.take(edge)

    def settle(self) -> None:
        """Computes the bound of the current messages."""
        for number in range(len(self.own)):
            self.least[number] = self.costs(number).min()

    # ---------------------------------------------------------------------------------------------------------------------------- bound

    @property
    def lower_bound(self) -> float:
        """Lower bound on the cost of every choice of options that are left."""
        return float(self.least.sum())

    def costs(self, number: int) -> Floats:
        """Cost of each option of a class, messages included; the excess over the least is that over the bound."""
        found = self.own[number].copy()
        for _, mine, _ in self.at[number]:
            found += mine.message[mine.at]
        return found

    def sweep(self, known: float = np.inf) -> None:
        """Visits all classes forth and back; `keep` loses the options that no choice of less than `known` seconds has."""
        for forward in (True, False):
            numbers = range(len(self.own))
            for number in numbers if forward else reversed(numbers):
                self._visit(number, forward, known)

    def _visit(self, number: int, forward: bool, known: float) -> None:
        behind, ahead = self.behind[forward][number], self.behind[not forward][number]
        for edge, mine, _ in behind:
            mine.message = self.room_for(edge, mine)
            self.take(edge)
        costs = self.costs(number)
        self.least[number] = costs.min()
        beyond = costs - self.least[number]
        self.keep[number] &= beyond <= known - self.lower_bound
        if ahead:
            part = beyond / max(len(behind), len(ahead))
            for edge, mine, _ in ahead:
                mine.message = mine.message - mine.least(part)
                self.take(edge)

    def room(self, edge: Edge) -> Floats:
        """Upper limit on the sum of a leg's two messages."""
        if edge.share is None or edge.mine is None:
            return edge.price
        late = self.late[edge.group]
        own = late.pop(edge.leg, None)
        while late:
            self._take(late.popitem()[1])
        if own is not None:
            late[edge.leg] = own  # the room of a leg is independent of its own share
        room: Floats = edge.price - edge.mine[:, edge.columns]
        room += edge.share
        return room

    def room_for(self, edge: Edge, side: Side) -> Floats:
        """Upper limit on the message of one side of a leg, by form, beside that of the other."""
        room = self.room(edge)
        found: Floats = (room - edge.reader.message).min(axis=1) if side is edge.maker else (room - edge.maker.message[:, None]).min(axis=0)
        return found

    def take(self, edge: Edge) -> None:
        """Marks the leg's share as outdated; it is computed when another leg asks for room, since messages may change until then."""
        if edge.share is not None:
            self.late[edge.group][edge.leg] = edge

    def _take(self, edge: Edge) -> None:
        assert edge.share is not None and edge.mine is not None, "a leg that is late has a share"
        share: Floats = edge.maker.message[:, None] + edge.reader.message
        if edge.extra is not None:
            share -= edge.extra
        np.maximum(share, 0.0, out=share)
        change = share - edge.share
        edge.share = share
        edge.mine[:, edge.columns] += change
        if edge.others:
            if edge.lasting is not None:
                change *= edge.lasting
            for taken in edge.others:
                taken[:, edge.columns] += change

    # ---------------------------------------------------------------------------------------------------------- excess over the bound

    def beyond(self) -> list[Floats]:
        """By class: least excess over the bound of a choice with each option."""
        return [self.costs(number) - self.least[number] for number in range(len(self.own))]

    def pairs(self) -> dict[tuple[int, int], Floats]:
        """By group and leg: least excess over the bound of a choice with each given and wanted form."""
        beyond = self.beyond()
        found: dict[tuple[int, int], Floats] = {}
        for edge in self.edges:
            slack = self.room(edge) - edge.maker.message[:, None] - edge.reader.message
            ends = edge.maker.least(beyond[edge.maker.number])[:, None] + edge.reader.least(beyond[edge.reader.number])
            found[edge.group, edge.leg] = slack + ends
        return found


def _as_slice(numbers: Numbers) -> slice | Numbers:
    """Consecutive numbers as a slice, which picks without a copy."""
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers
