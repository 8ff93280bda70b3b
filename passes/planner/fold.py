"""Classes of equal decisions: operators with equal calls, options and neighbours are decided once.

    layers.0 ... layers.31      one class for each operator of a layer, with the first and the last where they differ

Names of modules do not count: a class starts as equal calls (operator, arguments, shapes, labels and options), and is refined ROUNDS times
by the classes of what its members read and of their readers. Members of a class have one option, so the bound of a search holds for plans
that treat equal structure equally. Captured layers with omitted layers between them are in one class in any case.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from torch.fx import Node

from meshc.ir import leaves, op_name, records
from meshc.ir.schemas import call_number, with_call
from meshc.passes.depth.unequal import Unequal
from meshc.passes.planner.search_space import DecidedValue, Key, SearchSpace

ROUNDS: Final = 2
"""With more a layer is told from the next by how far it is from the ends: on three axes Mixtral and T5 are 0.4 and 0.2 % faster with three,
in 1.3 and 2.3 times the seconds, Mixtral 0.1 % slower with one. (Llama and BERT on `dp=8,tp=8`: without, 0.4 to 0.5 % slower.)"""


@dataclass(frozen=True)
class DecisionClasses:
    """
    of        class of each decision;  members  by class, in graph order: the first stands for all
    groups    values with equal makers and readings: equal options cost the same
    """

    of: dict[Key, int]
    members: tuple[tuple[Key, ...], ...]
    groups: tuple[tuple[DecidedValue, ...], ...]


def fold(space: SearchSpace, near: bool = False) -> DecisionClasses:
    """Classes of a space's decisions. `near`: layers that exchange values with omitted layers decide as these, where their calls are equal.
    Raises Unequal where twins differ."""
    number = _Numbers()
    of = {key: number(("decision", *_call_signature(space, key))) for key in space.decisions}
    for key, twin in space.twins.items():
        if of[key] != of[twin]:
            raise Unequal(f"{_key_text(key)} and {_key_text(twin)} cannot be decided alike")
    alike = {**space.twins, **{key: twin for key, twin in space.near.items() if near and of.get(key) == of.get(twin)}}
    for _ in range(ROUNDS):
        reads: dict[Key, list[Hashable]] = defaultdict(list)
        read_by: dict[Key, list[Hashable]] = defaultdict(list)
        for made in space.made:
            mine = of[made.decision]
            everyone = sorted(_reading(of, each) for each in made.readings)
            for each in made.readings:
                if each.reader in of:
                    reads[each.reader].append((_operand_place(each), mine, made.root[1], each.shape))
            read_by[made.decision].append((made.root[1] if made.root[0].op == "call_function" else 0, tuple(everyone)))
        of = {key: number((of[key], tuple(sorted(map(repr, reads[key]))), tuple(map(repr, read_by[key])))) for key in space.decisions}
        of |= {key: of[twin] for key, twin in alike.items()}
    members: dict[int, list[Key]] = defaultdict(list)
    for key, found in of.items():
        members[found].append(key)
    order = {found: at for at, found in enumerate(members)}
    of = {key: order[found] for key, found in of.items()}
    return DecisionClasses(of, tuple(map(tuple, members.values())), _groups(space, of))


def _groups(space: SearchSpace, of: dict[Key, int]) -> tuple[tuple[DecidedValue, ...], ...]:
    groups: dict[Hashable, list[DecidedValue]] = defaultdict(list)
    for made in space.made:
        node = made.root[0]
        at = op_name(node) if node.op == "call_function" else ""
        readings = tuple((_reading(of, each), each.landing, each.shape, each.defers, each.wants) for each in made.readings)
        groups[(of[made.decision], at, made.root[1], made.landing, made.sums, made.sizes, made.itemsize, readings)].append(made)
    return tuple(map(tuple, groups.values()))


def _reading(of: dict[Key, int], reading: object) -> tuple[int, str]:
    return of.get(reading.reader, -1), repr(_operand_place(reading))  # type: ignore[attr-defined]


def _operand_place(reading: object) -> tuple[str, int, str]:
    """(operator, operand, phase) of a reading: an update has several operators but one decision."""
    node = reading.node  # type: ignore[attr-defined]
    return ("" if node is None else op_name(node)), reading.operand, reading.phase  # type: ignore[attr-defined]


def _call_signature(space: SearchSpace, key: Key) -> Iterable[Hashable]:
    decision = space.decisions[key]
    if isinstance(key, tuple):
        return key[0], decision.labels, decision.sizes, decision.options
    shapes = tuple((one.shape, str(one.dtype)) for one in records(key))
    said = repr(constant_arguments(key)) if key.op == "call_function" else ""
    name = op_name(key) if key.op == "call_function" else key.op
    return name, said, shapes, records(key)[0].phase, decision.labels, decision.sizes, decision.options


def constant_arguments(node: Node) -> tuple[object, ...]:
    """Leaves of a call's arguments, None in place of nodes, without what differs by layer: numbers of random calls, and those in texts."""
    args = node.args if call_number(node) is None else with_call(node, 0)
    found = (one for argument in (*args, *node.kwargs.values()) for one in leaves(argument))
    return tuple(None if isinstance(one, Node) else re.sub(r"\d+", "", one) if isinstance(one, str) else one for one in found)


def _key_text(key: Key) -> str:
    return " of ".join(key) if isinstance(key, tuple) else key.name


class _Numbers:
    """Consecutive numbers of things, in order of first use."""

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.of.setdefault(thing, len(self.of))
