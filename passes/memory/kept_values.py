"""Minimum cut: the values of forward to keep so that backward has all it needs at the least cost.

    x -> mm -> h -> gelu -> a -> mm ...       backward reads h and a; a may be recomputed from h, so h is kept and a is not

A minimum cut (Ford and Fulkerson, 1956; as in torch's partitioner, He and Yu, MLSys 2023): flow goes from all values that may not be
recomputed to all that backward reads, through each value at the price of keeping it, and into each at the price of recomputing it. Of cuts
of equal cost the one closest to backward is taken, so that least is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final

from torch.fx import Node

from meshc.ir.trail import answer, largest
from meshc.passes.flow import behind_the_cut

_MOST: Final = 2**31 - 1
"""Unlimited capacity: no cut goes through it. The flow's numbers are 32-bit."""
_TOTAL: Final = 2**30


def least_kept(
    values: Sequence[Node], operands: Mapping[Node, Sequence[Node]], bytes_of: Callable[[Node], int | None], wanted: Collection[Node]
) -> set[Node]:
    """The values to keep, of the fewest bytes.

    values    of forward, in order
    operands  by value that may be recomputed, its operands among `values`; others may not be
    bytes_of  None: the value takes no memory of its own, and is never kept (a view, an integer, one of parameters alone)
    wanted    values that backward reads
    """
    sizes = {node: bytes_of(node) for node in values}
    unit = largest(1, -(-sum(size or 0 for size in sizes.values()) // _TOTAL))
    return _cut_values(values, operands, {node: size and largest(1, size // unit) for node, size in sizes.items()}, {}, wanted)


def all_kept(
    operands: Mapping[Node, Sequence[Node]], bytes_of: Callable[[Node], int | None], wanted: Collection[Node]
) -> set[Node]:  # fmt: skip
    """The values to keep if keeping costs nothing: those that backward reads, and the operands of those that are never kept."""
    found, work = set[Node](), list(wanted)
    seen = set(work)
    while work:
        node = work.pop()
        if bytes_of(node) is not None:
            found.add(node)
            continue
        fresh = [operand for operand in operands.get(node, ()) if operand not in seen]
        seen.update(fresh)
        work += fresh
    return found


def cheapest_kept(
    values: Sequence[Node], operands: Mapping[Node, Sequence[Node]], keeping: Mapping[Node, float | None], making: Mapping[Node, float],
    wanted: Collection[Node],
) -> set[Node]:  # fmt: skip
    """The values to keep at the least cost of `keeping` them (None: never kept) and of `making` others again, in one unit."""
    total = sum(cost or 0.0 for cost in keeping.values()) + sum(making.get(node, 0.0) for node in operands)
    scale = _TOTAL / total if total > 0 else 0.0
    keep = {node: None if cost is None else round(cost * scale) for node, cost in keeping.items()}
    return _cut_values(values, operands, keep, {node: round(making.get(node, 0.0) * scale) for node in operands}, wanted)


def _cut_values(
    values: Sequence[Node], operands: Mapping[Node, Sequence[Node]], keep: Mapping[Node, int | None], make: Mapping[Node, int],
    wanted: Collection[Node],
) -> set[Node]:  # fmt: skip
    if not wanted:
        return set()
    place = {node: 2 * index + 2 for index, node in enumerate(values)}  # the place where flow enters; it leaves at the next one
    source, sink = 0, 1
    edges: dict[tuple[int, int], int] = {}
    for node, at in place.items():
        cost = keep[node]
        edges[at, at + 1] = _MOST if cost is None else cost
        edges[source, at] = make.get(node, 0) if node in operands else _MOST
        for operand in operands.get(node, ()):
            edges[place[operand] + 1, at] = _MOST
        if node in wanted:
            edges[at + 1, sink] = _MOST
    cut = answer(partial(_cut_places, tuple(edges), len(values)), *edges.values())
    return {node for node, at in place.items() if at in cut}


def _cut_places(edges: Sequence[tuple[int, int]], count: int, *capacities: int) -> frozenset[int]:
    """Of `count` values, the places where flow enters those that are cut between entry and exit."""
    late = behind_the_cut(dict(zip(edges, capacities, strict=True)), 2 * count + 2)
    return frozenset(at for at in range(2, 2 * count + 2, 2) if at + 1 in late and at not in late)
