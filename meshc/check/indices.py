"""Ranges of checked indices against the numbers of rows of the operators that read by these indices.

    i: "i64[4]" = meshc.check_index(x, 0, 255, None, "x", "", True)
    y: "f32[4, h 8]" = aten.embedding(w, i)         w is [vocab 256, h 8]: refused, 0 to 255 are its rows

An index is followed in all stages from its check through operators that only move it, slices, and the conversion to a place in a rank's
tile of the rows (`tile_indices.py`). A line is not checked where types do not give the global number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from meshc import ir
from meshc.check.rule_shardings import RulesProtocol
from meshc.check.tile_indices import READS, WRITES, TileIndices, dim_of
from meshc.check.types import Wrong
from meshc.ir import Record, spmd
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops import take as _take  # noqa: F401 - registers one_hot
from meshc.program.program import Stage
from meshc.text.allowed_operators import spelling

CHECK: Final = torch.ops.meshc.check_index.default
ONE_HOT: Final = torch.ops.meshc.one_hot.default
Check = tuple[str, Node]
"""(stage, `check_index` line of the stage)."""


def faults(stages: Mapping[str, Stage], sizes: Mapping[str, int], rules: RulesProtocol) -> Iterator[tuple[str, str, str]]:
    """(stage, value, message) for every line that misuses an index into a rank's tile, and for every check of another range than a reader
    of the checked index takes."""
    handed: dict[str, frozenset[Check]] = {}
    tiles = TileIndices(sizes)
    for stage in stages.values():
        tiles.enter(stage.keys())
        behind: dict[Node, frozenset[Check]] = {node: handed.get(key, frozenset()) for node, key in stage.keys().items()}
        for node in stage.graph.nodes:
            if node.op == "call_function":
                try:
                    tiles.visit(node)
                except Wrong as wrong:
                    yield stage.name, node.name, f"{node.name} = {spelling(node.target)}(...): {wrong}"
                come = [behind.get(one, frozenset()) for one in _index_sources(node, rules, tiles)]
                behind[node] = frozenset().union(*come, [(stage.name, node)] if node.target is CHECK else [])
                misread = _misread(node, behind, rules, tiles)
                yield from ((name, check.name, f"{check.name}: {why}") for (name, check), why in misread.items())
        tiles.leave(stage.results())
        for key, value in stage.results().items():
            handed[key] = handed.get(key, frozenset()) | behind.get(value, frozenset())


def _index_sources(node: Node, rules: RulesProtocol, tiles: TileIndices) -> list[Node]:
    """The operands from which all integers of a result come, padding aside: unchanged, or as places in a rank's tile."""
    if node.target is CHECK or node.target in spmd.FUNCTIONS.values() or ir.is_getitem(node) or rules.only_moves(node):
        return node.all_input_nodes
    index = tiles.origin(node)
    return [] if index is None else [index]


def _misread(node: Node, behind: Mapping[Node, frozenset[Check]], rules: RulesProtocol, tiles: TileIndices) -> dict[Check, str]:
    tensors = [one for one in ir.operands(node) if not ir.is_integer(one)]
    if node.target is CHECK or not any(behind.get(one) for one in tensors):
        return {}
    whole, those = _of_whole_values(node, tensors, tiles)
    found: dict[Check, str] = {}
    for place, low, high, ignore in rules.ranges(whole, those) if whole is not None else ():
        checks = behind.get(tensors[place], frozenset())
        if checks and not any(tuple(check.args[1:4]) == (low, high, ignore) for _, check in checks):
            besides = "" if ignore is None else f" or {ignore}"
            for stage, check in checks:
                told = f"it lets {check.args[1]} to {cast(int, check.args[2]) - 1} through"
                found[stage, check] = f"{told}, and {node.name} reads by it, which takes {low} to {high - 1}{besides}"
    return found


def _of_whole_values(node: Node, tensors: list[Node], tiles: TileIndices) -> tuple[Node | None, list[Node]]:
    """The call with operands of global shapes, and these operands; None if a type gives no global shape."""
    graph, stands = Graph(), dict[Node, Node]()
    rows = {rows for one in tensors[1:] if (rows := tiles.whole_rows(one)) is not None} if node.target in (*READS, *WRITES) else set()
    for one in tensors:
        told = ir.records(one)[0]
        shape = told.sharding.shape if told.sharding is not None else tuple(told.shape) if rows else None
        if rows and one is tensors[0] and shape is not None:
            shape = tuple(max(rows) if dim == dim_of(node) else extent for dim, extent in enumerate(shape))
        if one not in stands and shape is not None:
            stands[one] = graph.placeholder(one.name)
            ir.set_record(stands[one], Record(shape, told.dtype))
    if len(stands) < len(set(tensors)):
        return None, []
    args, kwargs = map_arg((node.args, node.kwargs), lambda one: stands.get(one, 0))
    if node.target is ONE_HOT:  # its second argument is the number of columns of a tile
        made = ir.record(node).sharding
        if made is None:
            return None, []
        args = (args[0], made.shape[-1])
    return graph.create_node("call_function", node.target, args, kwargs), [stands[one] for one in tensors]
