"""Collectives and host copies in flight: where each is waited for, the limit on bytes in flight, and the memory they hold.

    g1 = mm(..)   r1 = reduce_scatter(g1)   g2 = mm(..)   r2 = reduce_scatter(g2)   ...   u1 = f(r1)
    g1 |------------------------------------------------|                                              waited for when r2 starts
    r1            |-----------------------------------------------------------------------------|

A collective, or a copy to or from the host, is waited for before the first line that reads its result, or at the stage's end. Its operand
stays in memory until then, so the bytes in flight of copies to the host, and of reduce-scatters that nothing reads for long (gradients),
are limited: the runtime waits for earlier ones before it starts another. The memory walk and the clock use the same waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Final

from torch.fx import Node

from meshc.ir import has_record, local_bytes, record, spmd
from meshc.ir.regions import region_of

MOST: Final = 128 * 1024 * 1024
"""Bytes in flight at most, unless one value alone has more."""
LEAST: Final = 1024 * 1024
SHARE: Final = 8
"""Small models: the limit is the stage's total bytes divided by this, at least `LEAST`."""

_HOLD: Final = frozenset(
    (spmd.all_gather, spmd.reduce_scatter, spmd.all_to_all, spmd.ring_shift, *spmd.OF_ORDER, spmd.halo, spmd.halo_sum)
)
"""Collectives that read their operand, or a copy of it, until they are done. An all-reduce or broadcast writes over its operand, or over a
copy that becomes the result."""


def earlier_waits(nodes: Iterable[Node]) -> Mapping[Node, list[Node]]:
    """Copy to the host, or reduce-scatter, of a stage -> the earlier ones that are waited for before it starts."""
    nodes = [node for node in nodes if has_record(node)]
    copies = {node: local_bytes(record(node)) for node in nodes if node.target is spmd.to_host}
    return {**_in_turn(nodes, copies), **_in_turn(nodes, _long_reduce_scatters(nodes))}


def _in_turn(nodes: Sequence[Node], sizes: Mapping[Node, int]) -> dict[Node, list[Node]]:
    limit = min(MOST, max(LEAST, sum(sizes.values()) // SHARE))
    found: dict[Node, list[Node]] = {}
    flying: dict[Node, int] = {}
    for node in nodes if sizes else ():
        for operand in node.all_input_nodes:
            flying.pop(operand, None)
        if node not in sizes:
            continue
        while flying and sum(flying.values()) + sizes[node] > limit:
            first = next(iter(flying))
            found.setdefault(node, []).append(first)
            del flying[first]
        flying[node] = sizes[node]
    return found


def _long_reduce_scatters(nodes: Sequence[Node]) -> dict[Node, int]:
    """Reduce-scatter -> bytes of its operand, for those not read before the next one starts, and for the last."""
    found: dict[Node, int] = {}
    last, read = None, False
    for node in nodes:
        if node.target is spmd.reduce_scatter:
            if read and last is not None:
                del found[last]
            found[node] = local_bytes(record(node.all_input_nodes[0]))
            last, read = node, False
        read = read or last in node.all_input_nodes
    return found


def waits(nodes: Iterable[Node], arriving: Collection[Node] = ()) -> dict[Node, Node]:
    """Collective or host copy, or value `arriving` when the stage begins -> the node before which it is waited for. Operands of a region
    are waited for before the region."""
    nodes = list(nodes)
    earlier = earlier_waits(nodes)
    begins: dict[int, Node] = {}
    found: dict[Node, Node] = {}
    flying = set(arriving)
    for node in nodes:
        number = region_of(node)
        before = node if number is None else begins.setdefault(number, node)
        for one in (*node.all_input_nodes, *earlier.get(node, ())):
            if one in flying:
                found[one] = before
                flying.discard(one)
        if node.op == "call_function" and (spmd.is_collective(node.target) or spmd.is_host_copy(node.target)):
            flying.add(node)
    return found


def most_bytes(nodes: Iterable[Node]) -> int:
    """Most bytes that the collectives and host copies of a stage hold at once: operands that stay, copies that are sent, results."""
    nodes = list(nodes)
    ended: dict[Node, list[Node]] = {}
    for one, before in waits(nodes).items():
        ended.setdefault(before, []).append(one)
    flying: dict[Node, int] = {}
    now = most = 0
    for node in nodes:
        now -= sum(flying.pop(one) for one in ended.get(node, ()))
        if node.op == "call_function" and (spmd.is_collective(node.target) or spmd.is_host_copy(node.target)):
            kept = local_bytes(record(node.all_input_nodes[0])) if holds_operand(node) else 0
            flying[node] = kept + sent_bytes(node) + local_bytes(record(node))
            now += flying[node]
            most = max(most, now)
    return most


def holds_operand(node: Node) -> bool:
    """Whether a node's operand stays in memory until the node has been waited for."""
    return node.target is spmd.to_host or (node.target in _HOLD and not sent_bytes(node) and not _is_alone(node))


def sent_bytes(node: Node) -> int:
    """Bytes of the contiguous copy of its operand that a collective sends, and holds until it has been waited for; 0 where it sends the
    operand itself. The parts for other ranks have to be contiguous."""
    if node.target not in (spmd.reduce_scatter, spmd.all_to_all) or _is_alone(node):
        return 0
    operand = record(node.all_input_nodes[0])
    return local_bytes(operand) if prod(operand.shape[: _dim(node, 2)]) != 1 else 0


def merged_bytes(node: Node) -> int:
    """Bytes of buffers that a collective needs beside its result while it is waited for: received parts are joined along a later dim, and
    the received half of a reordered dim is joined to the kept one."""
    if node.target in spmd.OF_ORDER:
        return half_bytes(node)
    if node.target not in (spmd.all_gather, spmd.all_to_all) or _is_alone(node):
        return 0
    made = record(node)
    return local_bytes(made) if prod(made.shape[: _dim(node, 2 if node.target is spmd.all_gather else 3)]) != 1 else 0


def half_bytes(node: Node) -> int:
    """Bytes of the half that is sent when a dim changes to or from zigzag order."""
    made = record(node)
    size = made.shape[_dim(node, 2)]
    return local_bytes(made) // max(1, size) * (size // 2)


def _dim(node: Node, place: int) -> int:
    dim = node.args[place]
    assert isinstance(dim, int)
    return dim % len(record(node).shape)


def _is_alone(node: Node) -> bool:
    """Whether the group is a single rank: the result has the operand's shape."""
    return node.target in (spmd.all_gather, spmd.reduce_scatter) and record(node).shape == record(node.all_input_nodes[0]).shape
