"""Axis assignments that a search has decided, which `propagate` takes in place of the plan's own choice."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from meshc.ir.sharding import Sharding
from meshc.passes.phases.factors import Factors, Token


@dataclass(frozen=True)
class Directive:
    """The axis assignment that one operator must take.

    axes      the axes that are decided; others stay open
    tokens    the axes of each token, major to minor
    deferred  axes over which operands come in still partial, and the result stays partial
    """

    axes: tuple[str, ...] = ()
    tokens: Mapping[Token, tuple[str, ...]] = field(default_factory=dict)
    deferred: tuple[str, ...] = ()

    def along(self, axes: Collection[str]) -> Directive:
        """The part about these axes."""

        def among(row: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(axis for axis in row if axis in axes)

        tokens = {token: kept for token, row in self.tokens.items() if (kept := among(row))}
        return Directive(among(self.axes), tokens, among(self.deferred))


@dataclass(frozen=True)
class AxisChoices:
    """The assignment of `axes` over a graph; other axes stay open.

    tokens    per operator: the axes of each token, major to minor
    deferred  per operator: axes over which its operands come in still partial, and its result stays partial; none if missing
    storage   per parameter name and kind (parameter, gradient, state): its sharding between steps
    """

    axes: tuple[str, ...]
    tokens: Mapping[Node, Mapping[Token, tuple[str, ...]]] = field(default_factory=dict)
    deferred: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)
    storage: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)

    def directive(self, node: Node) -> Directive | None:
        """The assignment of one operator; None if nothing is decided for it."""
        return Directive(self.axes, self.tokens[node], self.deferred.get(node, ())) if node in self.tokens else None


@dataclass(frozen=True)
class NamedChoices:
    """Choices by the names of operators, for another graph of the same model (a copy that is compared with it)."""

    choices: AxisChoices
    tokens: Mapping[str, Mapping[Token, tuple[str, ...]]]
    deferred: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(choices: AxisChoices) -> NamedChoices:
        tokens = {node.name: dict(taken) for node, taken in choices.tokens.items()}
        return NamedChoices(replace(choices, tokens={}, deferred={}), tokens, {node.name: axes for node, axes in choices.deferred.items()})

    def at(self, factors: Factors) -> AxisChoices:
        """The choices for the operators of another graph that have the same names and letters; other operators stay open."""
        nodes = {
            node.name: node
            for node, instance in factors.instances.items()
            if node.name in self.tokens and all(token in instance.size for token in self.tokens[node.name])
        }
        tokens = {node: self.tokens[name] for name, node in nodes.items()}
        return replace(self.choices, tokens=tokens, deferred={node: self.deferred.get(name, ()) for name, node in nodes.items()})
