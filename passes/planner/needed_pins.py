"""Operators that need a pin: those that the plan alone decides otherwise than the choices, after operators decided as chosen.

Choices are walked as by `propagate`. For each operator, its decision without a directive is compared with the chosen one; where they
differ, the smallest sufficient sets of axes of a directive are found. Pins of these operators suffice, since each operator follows others
that are decided as chosen. But a pin along some axes may change what the operator does along others, since a group of deferred reductions
may break up: `does` checks this for given pins.
"""

from __future__ import annotations

from itertools import combinations

from torch.fx import Node

from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factors import Instance
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.assign import propagator
from meshc.passes.place.propagate import Decision, Propagator


class NeededPins(Propagator):
    """
    needs  by operator that needs a pin: sufficient sets of axes, the smallest first
    """

    needs: dict[Node, tuple[frozenset[str], ...]]

    def decision(self, instance: Instance) -> Decision:
        wanted = super().decision(instance)
        told = self.choices.directive(instance.node)
        if told is not None and instance.node not in self.updates:
            enough = self._enough(instance, told, wanted)
            if frozenset() not in enough:
                self.needs[instance.node] = enough
        return wanted

    def does(self, instance: Instance, axes: frozenset[str]) -> bool:
        """Whether an operator with pins along `axes` is decided as chosen, if all operators before are."""
        told = self.directive(instance.node)
        return is_same_decision(self.decide(instance, told.along(axes | self._by_pins(instance))), self.decide(instance, told))

    def _by_pins(self, instance: Instance) -> set[str]:
        return set((self.pins.operators.get(instance.node) or Directive()).axes)

    def _enough(self, instance: Instance, told: Directive, wanted: Decision) -> tuple[frozenset[str], ...]:
        by_pins = self._by_pins(instance)
        free = [axis for axis in told.axes if axis not in by_pins]
        found: list[frozenset[str]] = []
        for count in range(len(free) + 1):
            for axes in map(frozenset, combinations(free, count)):
                if not any(fewer <= axes for fewer in found) and is_same_decision(
                    self.decide(instance, told.along(axes | by_pins)), wanted
                ):
                    found.append(axes)
        return tuple(found)


def find_needed_pins(placed: PlacedModel) -> NeededPins:
    """Needed pins of the choices, under the plan's entries and pins. `placed` has been annotated."""
    found = propagator(placed, NeededPins)
    found.needs = {}
    found.assign_shardings()
    return found


def is_same_decision(one: Decision, other: Decision) -> bool:
    """Whether two decisions of an operator are equal."""
    return _nonempty_decision(one) == _nonempty_decision(other)


def _nonempty_decision(decision: Decision) -> object:
    return {token: axes for token, axes in decision[0].items() if axes}, {value: how for value, how in decision[1].items() if how}
