"""Choices: what a search has decided for some axes, which `propagate` takes in place of what the plan would have it choose."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from meshc.ir.sharding import Sharding
from meshc.passes.phases.factors import Factors, Token


@dataclass(frozen=True)
class Directed:
    """What one operator is told to do along some axes.

    axes      those that are spoken of; what others do is not said
    tokens    the axes of each token, major to minor
    deferred  axes over which its operands come in still partial, and its result is
    """

    axes: tuple[str, ...] = ()
    tokens: Mapping[Token, tuple[str, ...]] = field(default_factory=dict)
    deferred: tuple[str, ...] = ()

    def along(self, axes: Collection[str]) -> Directed:
        """What is said of these axes."""
        tokens = {token: tuple(axis for axis in row if axis in axes) for token, row in self.tokens.items()}
        return Directed(
            tuple(axis for axis in self.axes if axis in axes),
            {token: row for token, row in tokens.items() if row},
            tuple(axis for axis in self.deferred if axis in axes),
        )


@dataclass(frozen=True)
class Choices:
    """What `axes` do; of other axes nothing is said.

    tokens    per operator: the axes of each token, major to minor
    deferred  per operator: axes over which its operands come in still partial, and its result is; where it is missing, none do
    storage   per parameter name and kind (parameter, gradient, state): how it lies between steps
    """

    axes: tuple[str, ...]
    tokens: Mapping[Node, Mapping[Token, tuple[str, ...]]] = field(default_factory=dict)
    deferred: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)
    storage: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)

    def directed(self, node: Node) -> Directed | None:
        """What an operator is to do; None for one of which nothing is said."""
        return Directed(self.axes, self.tokens[node], self.deferred.get(node, ())) if node in self.tokens else None


@dataclass(frozen=True)
class Known:
    """Choices by the names of operators, for another graph of the same model (a copy that is compared with it)."""

    choices: Choices
    tokens: Mapping[str, Mapping[Token, tuple[str, ...]]]
    deferred: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(choices: Choices) -> Known:
        tokens = {node.name: dict(taken) for node, taken in choices.tokens.items()}
        return Known(replace(choices, tokens={}, deferred={}), tokens, {node.name: axes for node, axes in choices.deferred.items()})

    def at(self, factors: Factors) -> Choices:
        """For the operators of a graph that have these names and letters; what others do is not said."""
        nodes = {
            node.name: node
            for node, instance in factors.instances.items()
            if node.name in self.tokens and all(token in instance.size for token in self.tokens[node.name])
        }
        tokens = {node: self.tokens[name] for name, node in nodes.items()}
        return replace(self.choices, tokens=tokens, deferred={node: self.deferred.get(name, ()) for name, node in nodes.items()})
