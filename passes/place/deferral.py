"""Deferred reductions: partial sums that stay partial past operators that are linear in them.

    a + b     both partial over tp, and read by nobody else       one reduction, of the total
    a * 0.5   a partial over tp                                   reduced where the product is read

Reductions are deferred past operators that are linear in their operands, where that saves a collective or moves it to a smaller value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from torch.fx import Node

from meshc.ir import is_getitem, records
from meshc.ir.sharding import Sharding
from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factors import Instance, Token, Value
from meshc.rules.layout import is_grown

Deferred: TypeAlias = dict[Value, tuple[tuple[str, str], ...]]
"""Operand -> reductions (axis, kind) that it need not have had."""


def may_defer(instance: Instance) -> bool:
    """Whether reductions of sums may be deferred past an operator: it is linear in the operands of `deferring`, each passed once."""
    rule = instance.rule
    if not rule.defers or not rule.linear:
        return False
    return rule.adds or instance.values.count(instance.values[0]) == 1  # x * x is not linear in x


def deferring(instance: Instance) -> tuple[Value, ...]:
    """The operands whose reductions are deferred, together."""
    return instance.values if instance.rule.adds else instance.values[:1]


@dataclass(frozen=True)
class DeferredReductions:
    """
    instances  instances of a graph's operators;  axes  the axes of more than one rank, in mesh order
    given      shardings of the values computed so far; grows as propagation goes on
    """

    instances: Mapping[Node, Instance]
    axes: Sequence[str]
    given: Mapping[Value, Sharding | None]

    def past(self, instance: Instance, chosen: Mapping[Token, tuple[str, ...]], told: Directive) -> Deferred:
        """The reductions deferred past an operator: operands that may come in partial, since the result is partial again."""
        if not may_defer(instance):
            return {}
        over = {*told.deferred, *self._over(instance, chosen, told.axes)}
        reductions = tuple((axis, "sum") for axis in self.axes if axis in over)
        return dict.fromkeys(deferring(instance), reductions) if reductions else {}

    def _over(self, instance: Instance, chosen: Mapping[Token, tuple[str, ...]], decided: Sequence[str]) -> list[str]:
        """The axes, except those `decided`, over which reducing the result instead saves a collective."""
        taken = {axis for axes in chosen.values() for axis in axes}.union(decided)
        partial = {value: dict((self.given.get(value) or Sharding()).partial) for value in instance.values}
        waiting = {axis for axes in partial.values() for axis, how in axes.items() if how == "sum"} - taken
        if not instance.rule.adds:
            (value,) = deferring(instance)
            small = prod(records(value[0])[value[1]].shape) <= 1
            free = small or self._only_user(value, instance.node)
            return [axis for axis in self.axes if axis in waiting and partial[value].get(axis) == "sum" and free]
        over: list[str] = []
        mixed: list[str] = []
        for axis in self.axes:
            if axis not in waiting:
                continue
            have = [value for value in instance.values if partial[value].get(axis) == "sum"]
            if not self._lonely(instance, have):
                continue
            if len(have) == len(instance.values):
                over.append(axis)
            elif have:
                mixed.append(axis)
        if mixed and (over or self._feeds_addition(instance.node)):
            over += mixed
        return over

    def all_partial(self, instance: Instance, axis: str) -> bool:
        """Whether all summands of an addition are partial over the axis: one reduction of the total is then enough."""
        if not instance.rule.adds:
            return False
        partial = [dict((self.given.get(value) or Sharding()).partial).get(axis) for value in instance.values]
        return all(how == "sum" for how in partial) and self._lonely(instance, instance.values)

    def _lonely(self, instance: Instance, values: Sequence[Value]) -> bool:
        """Whether nothing else reads these operands, and no layout has made them larger."""
        return all(self._only_user(value, instance.node) and not is_grown(value[0]) for value in values)

    def _only_user(self, value: Value, user: Node) -> bool:
        """Whether `user` is the only operator that reads `value`, through layouts."""
        node = value[0]
        while True:
            users = {u for u in node.users}
            if any(is_getitem(u) for u in users):
                return False
            if len(users) != 1:
                return False
            instance = self.instances.get(node)
            if instance is None or instance.kind != "layout":
                return True
            node = instance.values[0][0]

    def _feeds_addition(self, node: Node) -> bool:
        while len(node.users) == 1:
            user = next(iter(node.users))
            instance = self.instances.get(user)
            if instance is not None and instance.rule.adds and instance.kind == "compute":
                return True
            if instance is None or instance.kind != "layout" or is_grown(user):
                return False
            node = user
        return False
