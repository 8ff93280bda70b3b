"""Axis entries for choices: for each axis the line by which most operators do without a pin what is decided.

    dp: batch                         takes batch wherever an operator has it
    tp: heads@attention > batch       takes heads in attention, else batch

What recipes say is weighed, and what is read off the choices: rank by rank the factor that is right most often, and wrong least, of what
the ranks before it leave. Equal operators of layers count once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.fx import Node

from meshc.passes.phases.factors import Instance, Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.assign import propagator
from meshc.passes.place.interests import Interest, in_region, interests
from meshc.passes.place.operator_names import named_operators
from meshc.passes.place.propagate import Decision, Propagator
from meshc.passes.planner.layer_globs import factor_of_layers, operator_of_layers
from meshc.plan.entries import AxisEntry, FactorTerm
from meshc.plan.plan import Plan
from meshc.plan.recipes import RECIPES

SOURCE: Final = "the search"
"""Who has written such an entry."""
RANKS: Final = 4
"""Of an entry that is read off choices."""
EACH: Final = 3
"""Members of a class of equal operators that are asked."""
REGIONS: Final = (None, "attention", "products")
UNNAMED: Final = re.compile(r"f\d+")
"""Factors without a name of their own, whose numbers go by the layers."""


def choose_entries(placed: PlacedModel, axes: Iterable[str]) -> dict[str, AxisEntry]:
    """One for each of the axes. `placed` has been annotated and has choices."""
    operators = _sample_operators(placed)
    nodes = set(operators)
    idle = {axis: (Interest(axis, {}),) for axis in axes}
    rows = compare_entries(placed, nodes, idle)
    found = {axis: _candidates(placed, axis, rows[axis]) for axis in idle}
    asks = {axis: tuple(interests(Plan.of([entry]), placed.names, [axis])[axis] for entry in each) for axis, each in found.items()}
    missed = compare_entries(placed, nodes, asks)
    return {axis: _best(each, missed[axis], operators) for axis, each in found.items()}


def _sample_operators(placed: PlacedModel) -> dict[Node, str]:
    """A few members of each class of equal operators, with what the class is called."""
    members: dict[str, list[Node]] = {}
    for name, instance in named_operators(placed).items():
        members.setdefault(operator_of_layers(name), []).append(instance.node)
    return {node: group for group, nodes in members.items() for node in (*nodes[: EACH - 1], nodes[-1])}


def _best(entries: Sequence[AxisEntry], rows: Sequence[EntryRow], groups: dict[Node, str]) -> AxisEntry:
    """The entry that misses fewest classes of operators; the shortest of those."""
    def cost(at: int) -> tuple[int, int, int]:
        missed = {groups[row.node] for row in rows if row.missed[at]}
        return len(missed) + len(entries[at].terms), len(str(entries[at])), at

    return entries[min(range(len(entries)), key=cost)]


def _candidates(placed: PlacedModel, axis: str, rows: Sequence[EntryRow]) -> list[AxisEntry]:
    known = {name for names in placed.names.also.values() for name in names}
    found = [AxisEntry(axis, source=SOURCE)]
    for text in dict.fromkeys(text for recipe in RECIPES.values() for _, text in recipe.entries):
        ranks = Plan(f"{axis}: {text}").axes[0].ranks
        kept = tuple(rank for terms in ranks if (rank := tuple(term for term in terms if any(map(term.covers, known)))))
        found.append(AxisEntry(axis, kept, source=SOURCE))
    read: tuple[tuple[FactorTerm, ...], ...] = ()
    for term in _read_off(placed, rows):
        read = (*read, (term,))
        found.append(AxisEntry(axis, read, source=SOURCE))
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _OperatorOffer:
    """What an operator offers, by name, and what is taken of it."""

    node: Node
    offered: frozenset[str]
    taken: str | None


def _read_off(placed: PlacedModel, rows: Sequence[EntryRow]) -> list[FactorTerm]:
    """Ranks of one factor each. An operator that does what is decided with no entry, since its operands lie so, has no say."""
    names, instances = placed.names, placed.factors.instances

    def name(instance: Instance, token: object) -> str:
        return factor_of_layers(names.of[instance.factor[token]])  # type: ignore[index]

    left: list[_OperatorOffer] = []
    for row in rows:
        if row.taken is not None and not row.missed[0]:
            continue
        instance = instances[row.node]
        offered = frozenset(name(instance, token) for token in row.offered)
        left.append(_OperatorOffer(row.node, offered, None if row.taken is None else name(instance, row.taken)))
    found: list[FactorTerm] = []
    while len(found) < RANKS:
        terms = [
            FactorTerm(factor, region) for factor in sorted({one.taken for one in left if one.taken is not None}) for region in REGIONS
        ]
        gains = {term: _gain(placed, term, left) for term in terms if not UNNAMED.fullmatch(term.factor)}
        best = max(gains, key=lambda term: (gains[term], term.region is None, str(term)), default=None)
        if best is None or gains[best] <= 0:
            break
        found.append(best)
        left = [one for one in left if not _matches_term(placed, best, one)]
    return found


def _matches_term(placed: PlacedModel, term: FactorTerm, one: _OperatorOffer) -> bool:
    return term.factor in one.offered and (term.region is None or in_region(one.node, term.region, placed.names))


def _gain(placed: PlacedModel, term: FactorTerm, left: Sequence[_OperatorOffer]) -> int:
    return sum(1 if one.taken == term.factor else -1 for one in left if _matches_term(placed, term, one))


# Candidate entries of an axis, compared at each operator with what is decided, all other operators and axes doing that.


@dataclass(frozen=True)
class EntryRow:
    """One operator, on its way along one axis.

    offered  the tokens that the axis could split;  taken  the one that it does, or None
    missed   which of the entries that are weighed would have it do something else
    """

    node: Node
    offered: tuple[Token, ...]
    taken: Token | None
    missed: tuple[bool, ...]


class EntryComparison(Propagator):
    """
    asks  by axis, what the entries that are weighed let it take;  nodes  the operators that are asked
    rows  by axis
    """

    asks: Mapping[str, tuple[Interest, ...]]
    nodes: set[Node]
    rows: dict[str, list[EntryRow]]

    def decision(self, instance: Instance) -> Decision:
        wanted = super().decision(instance)
        if instance.node in self.nodes:
            for axis, interests in self.asks.items():
                self.rows[axis].append(self._row(instance, axis, interests, wanted))
        return wanted

    def _row(self, instance: Instance, axis: str, interests: tuple[Interest, ...], wanted: Decision) -> EntryRow:
        told = self.directive(instance.node)
        others = told.along([each for each in told.axes if each != axis])
        own, missed = self.interest, []
        for interest in interests:
            self.interest = {**own, axis: interest}
            missed.append(not _is_same_up_to_order(self.decide(instance, others), wanted))
        self.interest = own
        offered = tuple(token for token in instance.size if self._fits(instance, token, others.tokens))
        taken = next((token for token, axes in told.tokens.items() if axis in axes), None)
        return EntryRow(instance.node, offered, taken, tuple(missed))


def _is_same_up_to_order(one: Decision, other: Decision) -> bool:
    """Whether axes go to the same tokens, in whatever order, and the same is deferred: the order is that of all entries together."""
    first, second = ({token: set(axes) for token, axes in each[0].items() if axes} for each in (one, other))
    return first == second and one[1] == other[1]


def compare_entries(placed: PlacedModel, nodes: set[Node], asks: Mapping[str, tuple[Interest, ...]]) -> dict[str, list[EntryRow]]:
    """Of choices. `placed` has been annotated."""
    found = propagator(placed, EntryComparison)
    found.nodes, found.asks, found.rows = nodes, asks, {axis: [] for axis in asks}
    found.assign_shardings()
    return found.rows
