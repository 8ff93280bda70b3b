"""Factors: the indivisible indices of a graph, as classes over the dims of its values (`factorize` finds them)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from meshc.ir import Record, records

if TYPE_CHECKING:  # who holds a request needs no rules
    from meshc.rules.rule import Rule

Token = tuple[str, int]
Value = tuple[Node, int]


def value_record(value: Value) -> Record:
    return records(value[0])[value[1]]


@dataclass(frozen=True)
class Instance:
    """One operator with its letters solved into factors.

    A token is (letter, position): the position-th factor of that letter's dim. Tokens are local to the operator; `factor` maps them to the
    classes of the whole graph. `dims` of an operand or result lists the tokens of each dim, major to minor. `tied` has, both ways, the
    tokens that a window ties: axes split both or neither.
    """

    node: Node
    rule: Rule
    values: tuple[Value, ...]
    operands: tuple[tuple[tuple[Token, ...], ...], ...]
    results: tuple[tuple[tuple[Token, ...], ...], ...]
    sums: tuple[dict[Token, str], ...]
    whole: frozenset[Token]
    size: dict[Token, int]
    factor: dict[Token, int]
    known: bool = True
    tied: dict[Token, Token] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self.rule.kind


@dataclass
class Factors:
    """Factor classes of a graph: per value the classes of each dim, per operator its Instance."""

    dims: dict[Value, tuple[tuple[int, ...], ...]]
    size: dict[int, int]
    instances: dict[Node, Instance]
    dropped: list[str] = field(default_factory=list)

    def members(self) -> dict[int, list[Value]]:
        found: dict[int, list[Value]] = defaultdict(list)
        for value, dims in self.dims.items():
            for factor in dict.fromkeys(factor for dim in dims for factor in dim):
                found[factor].append(value)
        return found

    def tied(self) -> dict[int, set[int]]:
        """Classes that windows tie, directly or through others: class -> all classes of its group. Classes that are tied to none are left
        out."""
        groups: dict[int, set[int]] = {}
        for instance in self.instances.values():
            for token, other in instance.tied.items():
                pair = {instance.factor[token], instance.factor[other]}
                group = set().union(*(groups.get(factor, {factor}) for factor in pair))
                groups.update(dict.fromkeys(group, group))
        return groups
