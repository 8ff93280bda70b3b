"""Stage assignment: the pipeline stage, and the half of it, that computes each value of one microbatch.

    forward order   embed  block.0  block.1 | block.2  block.3  head        cuts: [3]
    half            (0, F) (0, F)   (0, F)  | (1, F)   (1, F)   (1, F)
    backward of block.2: (1, B)      of block.1: (0, B), and so on

An operator of the forward half belongs to the stage in which its place in the trace is, by the cuts; one of the backward half to the stage
of its forward operator (both have one `seq_nr` from AOTAutograd), but never to a later stage than the gradient that it reads: gradients
flow towards stage 0. Values of parameters alone (layouts, casts, gathers), and integers, have no half: each stage that reads them computes
them. So do values of inputs alone, unless a message is cheaper (`forwarded_values.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import is_getitem, operands, records
from meshc.ir.keys import is_a
from meshc.program.accumulate import ADDED, whole_of

FORWARD: Final = "F"
BACKWARD: Final = "B"


@dataclass(frozen=True)
class Half:
    """The pipeline stage that computes a value, and its half: F or B; W where backward is split."""

    stage: int
    op: str


@dataclass(frozen=True)
class Kinds:
    """The nodes of a graph by the inputs that they depend on.

    learned  parameters and integers alone
    given    inputs, buffers, constants and integers alone: every stage could compute these
    forward  the other nodes of the forward half, in order, which cuts divide
    backward the other nodes of the backward half, in order
    """

    learned: frozenset[Node]
    given: frozenset[Node]
    forward: tuple[Node, ...]
    backward: tuple[Node, ...]


def kinds(graph: Graph, keys: Mapping[Node, str]) -> Kinds:
    """The nodes of `graph` by the inputs that they depend on. `keys`: of the placeholders."""
    learned: set[Node] = set()
    given: set[Node] = set()
    forward: list[Node] = []
    backward: list[Node] = []
    late: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" and is_a(keys[node], *ADDED):
            late.add(node)  # a sum over microbatches is complete once all forwards have run
        elif node.op == "placeholder":
            (learned if is_a(keys[node], "parameter", "state", "gathered") else given).add(node)
        elif node.op == "call_function":
            read = node.all_input_nodes
            if any(operand in late for operand in read):
                backward.append(node)
                late.add(node)
            elif all(operand in given for operand in read):
                given.add(node)
            elif all(operand in learned or _integer(operand) for operand in read):
                learned.add(node)
            elif records(node)[0].phase == "backward":
                backward.append(node)
                late.add(node)
            else:
                forward.append(node)
    return Kinds(frozenset(learned), frozenset(given), tuple(forward), tuple(backward))


def _integer(node: Node) -> bool:
    return node.op == "call_function" and not is_getitem(node) and records(node)[0].dtype is None and len(records(node)) == 1


def positions(found: Kinds, numbers: Mapping[Node, int], parts: Mapping[Node, Node] | None = None) -> dict[Node, int]:
    """For each node that has a half, the position in `found.forward` that decides its stage, wherever the cuts are.

    numbers  `seq_nr` of a node's global-view value, where it has one
    parts    sum over microbatches -> the node that computes its terms: readers of the sum belong to the same stage
    """
    parts = parts or {}
    known: dict[Node, int] = {}
    by_number: dict[int, int] = {}
    for position, node in enumerate(found.forward):
        known[node] = known.get(node.args[0], position) if is_getitem(node) else position  # type: ignore[arg-type]
        if node in numbers:
            by_number[numbers[node]] = known[node]  # the last of its operators, with which backward begins
    order = sorted(by_number)
    last = max(len(found.forward) - 1, 0)
    late = set(found.backward)
    for node in found.backward:
        read = [operand for operand in operands(node) if operand in known]
        above = min((known[operand] for operand in read if operand in late), default=last)
        below = max((known[operand] for operand in read if operand not in late), default=above)
        wanted = below
        own = [known[parts[operand]] for operand in operands(node) if parts.get(operand) in known]
        if own:
            wanted = min(own)
        elif node in numbers:
            place = bisect_right(order, numbers[node]) - 1
            wanted = by_number[order[place]] if place >= 0 else 0
        known[node] = above if is_getitem(node) else min(wanted, above)
    return known


def assign_halves(found: Kinds, cuts: Sequence[int], at: Mapping[Node, int]) -> dict[Node, Half]:
    """The half of each node that has one.

    cuts  positions in `found.forward` at which stages 1, 2, ... begin
    at    position of each node
    """
    halves = {op: [Half(stage, op) for stage in range(len(cuts) + 1)] for op in (FORWARD, BACKWARD)}
    order = {FORWARD: found.forward, BACKWARD: found.backward}
    return {node: halves[op][bisect_right(cuts, at[node])] for op, nodes in order.items() for node in nodes}


def sums_read(keys: Mapping[Node, str], results: Mapping[str, Node]) -> dict[Node, Node]:
    """For each sum over microbatches that a graph reads, the node that computes a microbatch's term."""
    made = {whole[1]: node for key, node in results.items() if (whole := whole_of(key))}
    return {node: made[key] for node, key in keys.items() if key in made}


def sequence_numbers(graph: Graph, whole: Graph) -> dict[Node, int]:
    """`seq_nr` of each node of a per-rank graph, from its global-view value."""
    known = {node.name: node.meta["seq_nr"] for node in whole.nodes if node.meta.get("seq_nr") is not None}
    return {
        node: known[name]
        for node in graph.nodes
        if node.op == "call_function" and (name := records(node)[0].of.partition(".")[0]) in known
    }
