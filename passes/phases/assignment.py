"""Decisions of `propagate`: shardings of values and storage, axes of operators, rings and turns, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from meshc.ir.sharding import Sharding
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.factors import Factors, Token, Value

if TYPE_CHECKING:
    from meshc.rules.rule import Turns


@dataclass
class Assignment:
    """Decisions of `propagate`.

    given    per value: its sharding when computed; None if undecided (free values, parameters before storage)
    wanted   per operator: the sharding of each operand
    chosen   per operator: the axes of each token
    rings    per operator that passes blocks from rank to rank: the axes of the tokens that its rule's `rings` split, beyond `chosen`
    zigzag   operators of `rings` whose blocks are in zigzag order, which gives every rank the same work
    gathered operators that could pass blocks round a ring, where gathering is faster
    turns    per operator whose ranks take their stretches of its steps in turn: the number of parts
    free     operators that are recomputed on demand
    entries  the plan's entry of each axis, as text, for reasons
    storage  per parameter name and kind (parameter, gradient, state): its sharding between steps
    """

    factors: Factors
    names: FactorNames
    sizes: Mapping[str, int]
    given: dict[Value, Sharding | None] = field(default_factory=dict)
    wanted: dict[Node, tuple[Sharding, ...]] = field(default_factory=dict)
    chosen: dict[Node, dict[Token, tuple[str, ...]]] = field(default_factory=dict)
    rings: dict[Node, dict[Token, tuple[str, ...]]] = field(default_factory=dict)
    zigzag: set[Node] = field(default_factory=set)
    gathered: set[Node] = field(default_factory=set)
    turns: dict[Node, Turns] = field(default_factory=dict)
    free: set[Node] = field(default_factory=set)
    storage: dict[tuple[str, str], Sharding] = field(default_factory=dict)
    reasons: dict[Node, str] = field(default_factory=dict)
    replicated: list[Node] = field(default_factory=list)
    entries: dict[str, str] = field(default_factory=dict)

    def whole(self, value: Value) -> Sharding:
        """The unsharded type of a value."""
        return self.names.whole_sharding(self.factors, value)
