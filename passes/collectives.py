"""Collectives: start them where their operands are ready, and send small ones together.

    g1 = mm(..)   g2 = mm(..)   r1 = all_reduce(g1)   u1 = f(r1)   r2 = all_reduce(g2)   u2 = f(r2)
  becomes
    g1 = mm(..)   r1 = all_reduce(g1)   g2 = mm(..)   r2 = all_reduce(g2)   u1 = f(r1)   u2 = f(r2)

Partition writes a reduction where it is first needed; the runtime waits at the first use, so a reduction that starts right after its
operand runs beside the rest of backward. Gathers of stored parameters start one gather early (a parameter's worth of memory, no more).
All-reduces below SMALL bytes over the same axes travel as one. Every rank runs the same order.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from math import prod

import torch
from torch.fx import Graph, Node

from meshc import spmd
from meshc.ir import Record, is_getitem, is_integer, record, set_record
from meshc.passes.draft import Draft
from meshc.program import Stage
from meshc.sharding import Sharding

aten = torch.ops.aten

SMALL = 64 * 1024
"""Bytes below which a message costs more in latency than in copying (gloo and NCCL alike: tens of microseconds a call)."""

BUCKET = 4 * 1024 * 1024

PREPARATION = {
    aten.reshape.default, aten.slice.Tensor, aten.constant_pad_nd.default, aten.t.default, aten.transpose.int, aten.permute.default,
}  # fmt: skip


def schedule_collectives(draft: Draft) -> Draft:
    """Reorders each stage; values do not change."""
    for stage in draft.stages.values():
        _start_reductions(stage.graph)
        _merge_small(stage)
        _start_gathers(stage.graph)
        stage.graph.lint()
    return draft


def _positions(graph: Graph) -> dict[Node, float]:
    return {node: float(index) for index, node in enumerate(graph.nodes)}


def _is_preparation(node: Node) -> bool:
    return node.op == "call_function" and (
        node.target in PREPARATION or node.target in (spmd.shard, spmd.mask) or is_getitem(node) or is_integer(node)
    )


def _hoist(node: Node, place: dict[Node, float], last_placeholder: Node) -> None:
    """Move a node to right after the last of its operands, what prepares them first."""
    for operand in node.all_input_nodes:
        if _is_preparation(operand) and (len(operand.users) == 1 or is_integer(operand)):
            _hoist(operand, place, last_placeholder)
    anchor = max(node.all_input_nodes, key=lambda n: place[n], default=last_placeholder)
    if anchor.op == "placeholder":
        anchor = last_placeholder
    if place[node] - place[anchor] > 1e-9 and node is not anchor.next:
        anchor.append(node)
        place[node] = place[anchor] + 1e-6


def _start_reductions(graph: Graph) -> None:
    place = _positions(graph)
    placeholders = graph.find_nodes(op="placeholder")
    if not placeholders:
        return
    for node in list(graph.nodes):
        if node.target in (spmd.all_reduce, spmd.reduce_scatter) and node.args[1] != ["mb"]:
            _hoist(node, place, placeholders[-1])


def _start_gathers(graph: Graph) -> None:
    """Each gather of a stored parameter starts where the one before it stood."""
    keys = {node for node in graph.nodes if node.op == "placeholder"}
    gathers = [node for node in graph.nodes if node.target is spmd.all_gather and _from_placeholder(node, keys)]
    for before, node in reversed(list(pairwise(gathers))):
        anchor = before
        for item in _chain(node, keys):
            anchor.append(item)
            anchor = item


def _from_placeholder(node: Node, keys: set[Node]) -> bool:
    operand = node.args[0]
    while isinstance(operand, Node) and operand not in keys:
        if not _is_preparation(operand) or operand.target is spmd.shard:
            return False
        operand = operand.args[0]
    return True


def _chain(node: Node, keys: set[Node]) -> list[Node]:
    """A gather and what prepares it, in order; nodes that others share stay where they are, which is earlier."""
    found = [node]
    operand = node.args[0]
    while isinstance(operand, Node) and operand not in keys and len(operand.users) == 1:
        found.append(operand)
        operand = operand.args[0]
    if isinstance(operand, Node) and operand not in keys:
        return []
    return list(reversed(found))


def _merge_small(stage: Stage) -> None:
    graph = stage.graph
    order = {node: index for index, node in enumerate(graph.nodes)}
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is spmd.all_reduce and node.args[1] != ["mb"]:
            found = record(node)
            assert found.dtype is not None
            if prod(found.shape) * found.dtype.itemsize <= SMALL and node.users:
                groups[(tuple(node.args[1]), node.args[2], found.dtype)].append(node)
    for members in groups.values():
        for batch in _batches(members, order):
            if len(batch) > 1:
                _send_together(graph, batch)


def _batches(members: list[Node], order: dict[Node, int]) -> list[list[Node]]:
    """Runs of reductions of which none is read before the last one can start."""
    batches: list[list[Node]] = []
    bytes_so_far = 0
    first_read = 0
    for node in members:
        size = prod(record(node).shape) * record(node).dtype.itemsize  # type: ignore[union-attr]
        read = min(order[user] for user in node.users)
        if batches and order[node] < first_read and bytes_so_far + size <= BUCKET:
            batches[-1].append(node)
            bytes_so_far += size
            first_read = min(first_read, read)
        else:
            batches.append([node])
            bytes_so_far, first_read = size, read
    return batches


def _send_together(graph: Graph, batch: list[Node]) -> None:
    last = batch[-1]
    place = last

    def add(target: object, *args: object, like: Record, shape: tuple[int, ...], sharding: Sharding | None = None) -> Node:
        nonlocal place
        with graph.inserting_after(place):
            place = graph.call_function(target, args)  # type: ignore[arg-type]
        set_record(place, Record(shape, like.dtype, sharding, like.source, like.reason, like.phase))
        return place

    flat: list[Node] = []
    for node in batch:
        found = record(node)
        flat.append(add(aten.reshape.default, node.args[0], [-1], like=found, shape=(prod(found.shape),)))
    total = sum(record(node).shape[0] for node in flat)
    head = record(last)
    joined = add(aten.cat.default, flat, like=head, shape=(total,))
    like = Record((total,), head.dtype, None, head.source, f"{len(batch)} small reductions together", head.phase)
    reduced = add(spmd.all_reduce, joined, *last.args[1:], like=like, shape=(total,))
    start = 0
    for node in batch:
        found = record(node)
        size = prod(found.shape)
        piece = add(aten.slice.Tensor, reduced, 0, start, start + size, like=found, shape=(size,))
        piece = add(aten.reshape.default, piece, list(found.shape), like=found, shape=found.shape, sharding=found.sharding)
        node.replace_all_uses_with(piece)
        graph.erase_node(node)
        start += size
