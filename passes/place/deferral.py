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

from meshc.ir import is_getitem
from meshc.ir.sharding import Sharding
from meshc.passes.phases.choices import Directive
from meshc.passes.phases.factors import Instance, Token, Value, value_record
from meshc.rules.layout import is_grown

Deferred: TypeAlias = dict[Value, tuple[tuple[str, str], ...]]
"""Operand -> reductions (axis, kind) that it need not have had."""


def may_defer(instance: Instance) -> bool:
    """Whether reductions of sums may be deferred past an operator: it is linear in the operands of `deferring`, each passed once."""
    rule = instance.rule
    return bool(rule.defers and rule.linear and (rule.adds or instance.values.count(instance.values[0]) == 1))  # x * x is not linear in x


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
        waiting = [axis for axis in self.axes if axis not in taken]
        if not instance.rule.adds:
            (value,) = deferring(instance)
            free = instance.rule.always or prod(value_record(value).shape) <= 1 or self._only_user(value)
            return [axis for axis in waiting if free and self._is_sum(value, axis)]
        over: list[str] = []
        mixed: list[str] = []
        for axis in waiting:
            have = [value for value in instance.values if self._is_sum(value, axis)]
            if have and self._lonely(have):
                (over if len(have) == len(instance.values) else mixed).append(axis)
        if mixed and (over or self._feeds_addition(instance.node)):
            over += mixed
        return over

    def all_partial(self, instance: Instance, axis: str) -> bool:
        """Whether all summands of an addition are partial over the axis: one reduction of the total is then enough."""
        return instance.rule.adds and all(self._is_sum(value, axis) for value in instance.values) and self._lonely(instance.values)

    def _is_sum(self, value: Value, axis: str) -> bool:
        given = self.given.get(value)
        return given is not None and given.partial_over(axis) == "sum"

    def _lonely(self, values: Sequence[Value]) -> bool:
        """Whether each of these operands has one reader, and no layout has made it larger."""
        return all(self._only_user(value) and not is_grown(value[0]) for value in values)

    def _only_user(self, value: Value) -> bool:
        """Whether one operator alone reads `value`, through layouts."""
        node = value[0]
        while len(node.users) == 1 and not any(map(is_getitem, node.users)):
            instance = self.instances.get(node)
            if instance is None or instance.kind != "layout":
                return True
            node = instance.values[0][0]
        return False

    def _feeds_addition(self, node: Node) -> bool:
        while len(node.users) == 1:
            (node,) = node.users
            instance = self.instances.get(node)
            if instance is not None and instance.rule.adds and instance.kind == "compute":
                return True
            if instance is None or instance.kind != "layout" or is_grown(node):
                return False
        return False
