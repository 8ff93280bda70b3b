"""Choices: what a search has decided for some axes, which `propagate` takes in place of what the plan would have it choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from meshc.ir.sharding import Sharding
from meshc.passes.phases.factors import Token


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
