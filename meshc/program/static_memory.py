"""Assignment of a stage's `kept` values to memory that is reused at each call, by their live ranges.

    flat: "f32[68]; its parts inside, kept" = aten.cat([a, b])       a bucket of gradients, from its first part to the update that reads
    r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")
    ...
    flat_2: "f32[70]; its parts inside, kept" = aten.cat([c, d])     reuses flat's memory, if c and d are computed after that update

A value is live from the first line that writes into its memory to the last that reads it, or a value over it. Values are assigned in the
order of those first lines, best fit: the free piece that differs least in size, which grows if need be. The runtime, the simulator and the
memory walk use this assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch.fx import Graph, Node

from meshc.ir import local_bytes, record, spmd
from meshc.ir.sharing import KEPT, OVER_OPERAND, Words, sharing_of
from meshc.program import in_flight
from meshc.program.packing import may_view, pieces

Span = tuple[int, int]
"""Live range: the first and the last position in the graph at which a value needs its memory."""


def places(graph: Graph, words: Words = sharing_of) -> list[list[Node]]:
    """For each piece of memory the values that use it, one after another: `cat` nodes, or products."""
    found = spans(graph, words)
    kept = list(found)
    return [[kept[index] for index in one] for one in assign_memory(list(found.values()), [local_bytes(record(node)) for node in kept])]


def spans(graph: Graph, words: Words = sharing_of) -> dict[Node, Span]:
    """Live ranges of the `kept` values, in the order of their first positions."""
    nodes = list(graph.nodes)
    kept = [node for node in nodes if KEPT in words(node)]
    if not kept:
        return {}
    at = {node: index for index, node in enumerate(nodes)}
    until = {one: at[node] for one, node in in_flight.waits(nodes).items()}
    first = {node: at[node] for node in kept}
    for part, piece in pieces(graph, words).items():
        if piece.whole in first:
            first[piece.whole] = min(first[piece.whole], at[part])
    return {node: (first[node], _last(node, at, until, words)) for node in sorted(kept, key=first.__getitem__)}


def assign_memory(when: Sequence[Span], sizes: Sequence[int]) -> list[list[int]]:
    """Best-fit assignment of values with these live ranges and bytes: for each piece of memory the indices of its values."""
    found: list[list[int]] = []
    free_from: list[int] = []
    held: list[int] = []
    for value, ((first, last), size) in enumerate(zip(when, sizes, strict=True)):
        free = [index for index in range(len(found)) if free_from[index] < first]
        if free:
            best = min(free, key=lambda index: (abs(held[index] - size), index))
            found[best].append(value)
            held[best], free_from[best] = max(held[best], size), last
        else:
            found.append([value])
            held.append(size)
            free_from.append(last)
    return found


def sizes_of(found: Sequence[Sequence[Node]]) -> list[int]:
    """Bytes of each piece of memory."""
    return [max(local_bytes(record(node)) for node in values) for values in found]


def _last(node: Node, at: Mapping[Node, int], until: Mapping[Node, int], words: Words) -> int:
    """The position of the last read of a value's memory."""
    return max([at[node], *(_read_position(user, at, until) for user in _readers(node, words))])


def _read_position(user: Node, at: Mapping[Node, int], until: Mapping[Node, int]) -> int:
    travels = user.op == "call_function" and (spmd.is_collective(user.target) or spmd.is_host_copy(user.target))
    return until.get(user, len(at)) if travels else at[user]


def _readers(node: Node, words: Words) -> Iterator[Node]:
    for user in node.users:
        yield user
        if may_view(user) or (OVER_OPERAND in words(user) and user.args[0] is node):
            yield from _readers(user, words)
