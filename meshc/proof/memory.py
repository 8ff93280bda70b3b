"""Memory that values share, in a proof: nothing is written over that is still to be read.

    flat: "f32[68]; its parts inside" = aten.cat([a, b])                 a and b are made in the memory of flat
    r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")     from here on flat, a and b, and views of them, are gone

Slices of one memory that do not meet are apart. Updates in place are looked at by the checks of texts (`meshc/check/overwrites.py`),
which also say what may be a view of what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.check import overwrites
from meshc.check.stage import may_view
from meshc.ir import KEY, Record, is_getitem, is_integer, record, spmd
from meshc.ir.nodes import is_tensor
from meshc.ir.schemas import named_arguments
from meshc.ir.sharing import OVER_OPERAND, PARTS_INSIDE, sharing_of
from meshc.program.program import Stage

Region = tuple[tuple[int, ...], int, int, int] | None
"""Part of a memory: positions `start` to `end` of a dim of a view with this shape; None: all of it, or nobody knows."""


def memory_faults(stage: Stage, sizes: Mapping[str, int]) -> Iterator[tuple[Node, str]]:
    """(line, message) where a line reads what has been written over."""
    memory = dict(overwrites.memories(stage, lambda target: may_view(target) and not spmd.is_collective(target)))
    memory |= {node: memory[first_operand(node)] for node in stage.graph.nodes if _returns_its_operand(node, sizes)}
    regions: dict[Node, Region] = {}
    inside: dict[Node, list[tuple[str, Region]]] = {}
    writers: dict[str, list[tuple[Node, Region]]] = defaultdict(list)
    made: dict[Node, dict[str, int]] = {}
    """Value -> its places in memory, each with how often that had been written over when the value was made."""
    for node in stage.graph.nodes:
        regions[node] = _region(node, regions)
        if _is_view(node):  # it reads nothing yet; what it is a view of is what its readers mean
            known = [pair for operand in node.all_input_nodes for pair in made[operand].items()]
            made[node] = {place: count for place, count in known if place in memory[node]}
            continue
        for operand in node.all_input_nodes:
            later = [written for place, count in made[operand].items() for written in writers[place][count:]]
            by = next((writer for writer, region in later if not _are_apart(region, regions[operand])), None)
            if by is not None:
                yield node, f"it reads {operand}, in whose memory {by} has been written"
                break
        words = sharing_of(node)
        if PARTS_INSIDE in words:
            made_there = [part for part in node.all_input_nodes if not _is_view(first_operand(part))]  # of views only the elements come
            inside[node] = [(place, regions[part]) for part in made_there for place in sorted(memory[part])]
        if OVER_OPERAND in words:
            operand = first_operand(node)
            for place, region in [*((place, regions[operand]) for place in sorted(memory[operand])), *inside.get(operand, ())]:
                writers[place].append((node, region))
        made[node] = {place: len(writers[place]) for place in sorted(memory.get(node, ()))}
    named = {node.name: node for node in stage.graph.nodes}
    last = next(reversed(stage.graph.nodes))
    for name, why in overwrites.faults(stage, may_view):
        yield named.get(name, last), why


def first_operand(node: Node) -> Node:
    return node.all_input_nodes[0]


def _returns_its_operand(node: Node, sizes: Mapping[str, int]) -> bool:
    """Whether a collective is over one rank."""
    axes: Any = node.args[1] if spmd.is_collective(node.target) else ()
    return bool(axes) and prod(sizes[axis] for axis in axes) == 1


def _is_view(node: Node) -> bool:
    if node.op != "call_function" or not node.all_input_nodes or spmd.is_collective(node.target):
        return False
    return is_getitem(node) or not (isinstance(node.meta[KEY], Record) and is_integer(node)) and may_view(node.target)


def _region(node: Node, regions: Mapping[Node, Region]) -> Region:
    if not _is_view(node):
        return None
    operand = first_operand(node)
    if regions[operand] is not None or node.target is not torch.ops.aten.slice.Tensor or not is_tensor(operand):
        return regions[operand]
    given, shape = named_arguments(node), record(operand).shape
    dim, start, end = given["dim"] % len(shape), given["start"] or 0, given["end"]
    if not isinstance(start, int) or not isinstance(end, int) or start < 0 or end < 0:
        return None
    return shape, dim, start, end


def _are_apart(one: Region, other: Region) -> bool:
    if one is None or other is None or one[:2] != other[:2]:
        return False
    return min(one[3], other[3]) <= max(one[2], other[2])
