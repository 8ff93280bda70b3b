"""Choices: what a search has decided for some axes, which `propagate` takes in place of what the plan would have it choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch.fx import Node

from meshc.ir.sharding import Sharding
from meshc.passes.phases.factors import Factors, Token


@dataclass(frozen=True)
class Choices:
    """What `axes` do; of other axes nothing is said.

    tokens    per operator: the axes of each token, major to minor
    deferred  per operator: axes over which its operands come in still pending, and its result is; where it is missing, none do
    storage   per parameter name and kind (parameter, gradient, state): how it lies between steps
    """

    axes: tuple[str, ...]
    tokens: Mapping[Node, Mapping[Token, tuple[str, ...]]] = field(default_factory=dict)
    deferred: Mapping[Node, tuple[str, ...]] = field(default_factory=dict)
    storage: Mapping[tuple[str, str], Sharding] = field(default_factory=dict)


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
