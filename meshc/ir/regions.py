"""Regions of a stage: neighbouring nodes compiled as one function, marked by a number on each node, and why a node is in none.

    with region(2):
        mm: "f32[8, 4]" = aten.mm(x, w)
        relu: "f32[8, 4]" = aten.relu(mm)
    all_reduce: "f32[8, 4]" = all_reduce(relu, ["tp"], "sum")        in no region: runs by itself

Nodes of one number are contiguous, and no number recurs later in its stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import runs_on_host, spmd
from meshc.ir.used_rows_dims import of_used_rows
from meshc.private import OpOverload

REGION: Final = "meshc region"


def region_of(node: Node) -> int | None:
    """The number of the region that a node is in; None if it runs by itself."""
    return node.meta.get(REGION)


def set_region(node: Node, number: int) -> None:
    node.meta[REGION] = number


def blocks(nodes: Iterable[Node]) -> Iterator[tuple[int | None, list[Node]]]:
    """(number, nodes) of each run of neighbours in one region; number None for those in no region."""
    for number, members in groupby((node for node in nodes), region_of):  # a graph's own iterator begins again behind its end
        yield number, list(members)


def is_number(node: Node) -> bool:
    """Whether a node is an integer that depends on the rank or microbatch alone (a coordinate, a tile's start or count)."""
    return node.op == "call_function" and node.target in spmd.INTEGERS.values()


def why_alone(node: Node, changing: set[Node]) -> str:
    """Why a call cannot be compiled with others, once for all ranks and microbatches; empty if it can. `changing`: the integers that
    depend on the microbatch."""
    if spmd.is_collective(node.target):
        return "talks to other ranks"
    if spmd.is_host_copy(node.target):
        return "copies between the device and its host"
    if runs_on_host(node):
        return "runs on the host"
    if is_number(node):
        return "says where a rank or a microbatch stands"
    if any(operand in changing for operand in node.all_input_nodes):
        return "is another for each microbatch"
    if of_used_rows(node):
        return "has as many rows as are used"
    return "writes into its operands" if writes(node) else ""


def writes(node: Node) -> bool:
    """Whether a call writes into its operands."""
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def microbatch_integers(graph: Graph) -> set[Node]:
    """The integers that depend on the microbatch."""
    found: set[Node] = set()
    for node in graph.nodes:
        if is_number(node) and (node.args[0] == spmd.MICROBATCH or any(operand in found for operand in node.all_input_nodes)):
            found.add(node)
    return found
