"""Indices that are looked at before an operator reads by them: for the rows that this operator has, and no others.

    i: "i64[4]" = meshc.check_index(x, 0, 255, None, "x", "", True)
    y: "f32[4, h 8]" = aten.embedding(w, i)         w is [vocab 256, h 8]: refused, 0 to 255 are its rows

Looked at is what is checked itself, and what is only moved or cut out of it, in any stage. Where a line's types do not say of how many rows
it reads a tile, nothing is said; nor where an index is computed with, as it is where the rows themselves are split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from meshc import ir
from meshc.check.ruled import Rules
from meshc.ir import Record, spmd
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops import take as _take  # noqa: F401 - registers one_hot
from meshc.program.program import PlainProgram

CHECK: Final = torch.ops.meshc.check_index.default
ONE_HOT: Final = torch.ops.meshc.one_hot.default
Check = tuple[str, Node]
"""A stage, and a line of it that looks at an index."""


def faults(program: PlainProgram, rules: Rules) -> Iterator[tuple[str, str, str]]:
    """(stage, value, what is wrong) for every check of another range than that of who reads by what it has let through."""
    handed: dict[str, frozenset[Check]] = {}
    for stage in program.stages.values():
        behind: dict[Node, frozenset[Check]] = {node: handed.get(key, frozenset()) for node, key in stage.keys().items()}
        for node in stage.graph.nodes:
            if node.op == "call_function":
                come = [behind.get(one, frozenset()) for one in node.all_input_nodes] if _moves(node, rules) else []
                behind[node] = frozenset().union(*come, [(stage.name, node)] if node.target is CHECK else [])
                yield from ((name, check.name, f"{check.name}: {why}") for (name, check), why in _misread(node, behind, rules).items())
        for key, value in stage.results().items():
            handed[key] = handed.get(key, frozenset()) | behind.get(value, frozenset())


def _moves(node: Node, rules: Rules) -> bool:
    """Whether a result holds no other integers than its operands do, but for padding."""
    return node.target is CHECK or node.target in spmd.FUNCTIONS.values() or ir.is_getitem(node) or rules.only_moves(node)


def _misread(node: Node, behind: Mapping[Node, frozenset[Check]], rules: Rules) -> dict[Check, str]:
    tensors = [one for one in ir.operands(node) if not ir.is_integer(one)]
    if node.target is CHECK or not any(behind.get(one) for one in tensors):
        return {}
    whole, those = _of_whole_values(node, tensors)
    found: dict[Check, str] = {}
    for place, low, high, ignore in rules.ranges(whole, those) if whole is not None else ():
        checks = behind[tensors[place]]
        if checks and not any(tuple(check.args[1:4]) == (low, high, ignore) for _, check in checks):
            besides = "" if ignore is None else f" or {ignore}"
            for stage, check in checks:
                told = f"it lets {check.args[1]} to {cast(int, check.args[2]) - 1} through"
                found[stage, check] = f"{told}, and {node.name} reads by it, which takes {low} to {high - 1}{besides}"
    return found


def _of_whole_values(node: Node, tensors: list[Node]) -> tuple[Node | None, list[Node]]:
    """The call as it is of whole values, and what stands for its operands; None where a type does not say what these are."""
    graph, stands = Graph(), dict[Node, Node]()
    for one in tensors:
        told = ir.records(one)[0]
        if one not in stands and told.sharding is not None:
            stands[one] = graph.placeholder(one.name)
            ir.set_record(stands[one], Record(told.sharding.shape, told.dtype))
    if len(stands) < len(set(tensors)):
        return None, []
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: stands.get(one, 0))
    if node.target is ONE_HOT:  # which is told how many columns a tile has
        made = ir.record(node).sharding
        if made is None:
            return None, []
        args = (args[0], made.shape[-1])
    return graph.create_node("call_function", node.target, args, kwargs), [stands[one] for one in tensors]
