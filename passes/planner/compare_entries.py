"""Candidate entries of an axis, compared at each operator with what is decided, all other operators and axes doing that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from meshc.passes.phases.factors import Instance, Token
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.assign import propagator
from meshc.passes.place.interests import Interest
from meshc.passes.place.propagate import Decision, Propagator


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
