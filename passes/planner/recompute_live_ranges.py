"""Live ranges of recomputable values: alive in their layer's forward and again in its backward, and not between.

    position     forward of layer 3 .......... other layers .......... backward of layer 3
    kept         |----------------------------------------------------------------------|
    recomputed   |------------------|                                  |----------------|

What may be recomputed is what a budget would choose from (`memory/policies.py`): of layers what nothing else reads, beside them what is
cheap. It is taken to be there from where backward first reads anything of its layer.

A head and loss whose chunks nobody has counted may run in the most that are tried (`place/head_operators.py`): of logits there is one
chunk then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from torch.fx import Node

from meshc.ir import calls, records
from meshc.passes.memory.policies import BY_BUDGET, layer_of, policy_of
from meshc.passes.phases.factors import Value
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.head_operators import MOST, default_chunked_head, tall_operators
from meshc.passes.planner.search_space import DecidedValue

Span: TypeAlias = tuple[int, int, float]
"""First and last position, and the share of a value that is there."""


def live_range_gaps(values: Iterable[DecidedValue], placed: PlacedModel) -> dict[Value, tuple[int, int]]:
    """Of each value that may be recomputed the positions between which it need not be there."""
    policy = policy_of(BY_BUDGET, [node for node in calls(placed.graph) if records(node)[0].phase == "forward"], pipeline=False)
    last: dict[Value, int] = {}
    first: dict[object, int] = {}
    for value in values:
        node = value.root[0]
        if node.op != "call_function" or value.phase != "forward" or not policy.may(node):
            continue
        late = [reading.position for reading in value.readings if reading.phase == "backward"]
        early = [reading for reading in value.readings if reading.phase == "forward"]
        if late and all(reading.node is None or layer_of(reading.node) == layer_of(node) for reading in early):
            last[value.root] = max((reading.position for reading in early), default=value.position)
            group = _group(node)
            first[group] = min(first.get(group, late[0]), *late)
    return {value: (position, begin) for value, position in last.items() if (begin := first[_group(value[0])]) > position}


def chunk_shares(placed: PlacedModel) -> dict[Node, float]:
    """Which share of what an operator of the head makes is there at a time."""
    head = default_chunked_head(placed, MOST)
    return {} if head is None else dict.fromkeys(tall_operators(placed, head), 1 / MOST)


def _group(node: Node) -> object:
    return layer_of(node) or node


def outside_gap(spans: Iterable[Span], gap: tuple[int, int]) -> Iterator[Span]:
    """What is left of spans on both sides of a gap."""
    for first, last, share in spans:
        if first <= gap[0]:
            yield first, min(last, gap[0]), share
        if last >= gap[1]:
            yield max(first, gap[1]), last, share
