"""Bundle: collectives that can travel together do.

    r1 = all_reduce(g1, ["dp"], "sum")        flat = cat([reshape(g1, [-1]), reshape(g2, [-1])])
    r2 = all_reduce(g2, ["dp"], "sum")        r = all_reduce(flat, ["dp"], "sum")
                                              r1 = reshape(slice(r, 0, 0, 64), [8, 8])   r2 = ...

A message costs tens of microseconds before its first byte moves, with gloo and NCCL alike. Together go, over the same axes:

- all-reduces below SMALL bytes, if none is read before the last can start;
- all-reduces of gradients, in buckets as DistributedDataParallel's (pytorch.org/docs/stable/notes/ddp.html), up to ALONE bytes each;
- gathers of stored vectors (norms, biases) of one phase, and the reduce-scatters of their gradients.

Matrices that are stored split travel alone: gathered together they would be whole at once. Where it has been decided which of them start
together (`level`), those go together too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from meshc.ir import Record, local_bytes, record, records, spmd
from meshc.ir.graph import call
from meshc.program.packing import is_view
from meshc.program.preparation import chain, from_placeholder
from meshc.program.program import Stage

aten = torch.ops.aten

SMALL = 64 * 1024
"""Bytes below which a message costs more in latency than in copying."""

BUCKET = 25 * 1024 * 1024
"""Bytes that travel together at most: DistributedDataParallel's `bucket_cap_mb`."""

ALONE = 8 * 1024 * 1024
"""Bytes from which a gradient gains nothing by company, and is not worth a copy."""

FIRST = 1024 * 1024
"""Gradients of up to twice these bytes are one message; DistributedDataParallel's first bucket has this size."""


def bundle(
    stage: Stage, sizes: Mapping[str, int], level: Mapping[Node, int] | None = None, window: int = BUCKET, apart: Collection[Node] = ()
) -> dict[Node, Node]:
    """Joins collectives of a stage, in place; gives each new one, with one of those that it stands for. `sizes`: of the mesh's axes.

    With `level`, matrices that are stored split travel together too, up to `window` bytes of those of one level; not those `apart`.
    """
    order = {node: index for index, node in enumerate(stage.graph.nodes)}
    groups: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for node in stage.graph.nodes:
        kind = _kind(node, level is not None)
        if kind and node not in apart:
            alike = record(node).phase if node.target is spmd.all_gather else node.args[-1]  # the reduction
            start = level[node] if level is not None else 0
            groups[(node.target, kind, tuple(node.args[1]), alike, record(node).dtype, start)].append(node)
    planned: list[tuple[list[Node], int]] = []
    for (target, kind, axes, *_), members in groups.items():
        limit = _limit(members) if kind == "gradient" else window
        batches = _batches(members, order, limit, reads=target is not spmd.all_gather)
        planned += [(batch, prod(sizes[axis] for axis in axes)) for batch in batches if len(batch) > 1]
    return {_Bundle(stage.graph, batch, count).send(): batch[0] for batch, count in planned}


def _kind(node: Node, matrices: bool) -> str:
    """Why a collective may travel with others of its kind; "" if it may not."""
    if not spmd.is_collective(node.target) or node.args[1] == ["mb"] or spmd.joins_stages(node) or not node.users:
        return ""
    if node.target is spmd.all_reduce:
        if local_bytes(record(node)) < ALONE and _read_late(node):
            return "gradient"
        return "small" if local_bytes(record(node)) <= SMALL else ""
    if not matrices and local_bytes(record(node)) > SMALL:
        return ""
    if node.target is spmd.all_gather and from_placeholder(node) and chain(node):
        return "stored" if matrices or len(record(chain(node)[0].all_input_nodes[0]).shape) == 1 else ""
    if node.target is spmd.reduce_scatter and _read_late(node):
        return "stored" if matrices or _is_vector(node) else ""
    return ""


def _is_vector(node: Node) -> bool:
    """Whether a value has one dim, or is read as such: a vector whose dim is a product of factors travels as several dims."""
    return len(record(node).shape) == 1 or any(is_view(user) and _is_vector(user) for user in node.users)


def _read_late(node: Node) -> bool:
    """Whether nothing but an update, or the stage's end, reads a reduction: so it is with gradients."""
    return all(user.op == "output" or records(user)[0].phase == "update" or (is_view(user) and _read_late(user)) for user in node.users)


def _limit(gradients: list[Node]) -> int:
    """The bytes of a bucket at most: there are at least two, so that one travels while the rest is computed."""
    sizes = [local_bytes(record(node)) for node in gradients]
    total, largest = sum(sizes), max(sizes)
    return min(BUCKET, (total + largest) // 2) if total > 2 * FIRST else total


def _batches(members: list[Node], order: Mapping[Node, int], limit: int, reads: bool) -> list[list[Node]]:
    """Runs of at most `limit` bytes. With `reads`, none is read before the last of its run can start."""
    batches: list[list[Node]] = []
    bytes_so_far = 0
    first_read = 0
    for node in members:
        read = min(order[user] for user in node.users)
        if batches and (order[node] < first_read or not reads) and bytes_so_far + local_bytes(record(node)) <= limit:
            batches[-1].append(node)
            bytes_so_far += local_bytes(record(node))
            first_read = min(first_read, read)
        else:
            batches.append([node])
            bytes_so_far, first_read = local_bytes(record(node)), read
    return batches


class _Bundle:
    """Several collectives of one kind, as one. A gather stands where the first of them stood, a reduction where the last one did."""

    def __init__(self, graph: Graph, members: list[Node], count: int) -> None:
        self.graph, self.members, self.count = graph, members, count
        self.gather = members[0].target is spmd.all_gather
        self.scatter = members[0].target is spmd.reduce_scatter
        if self.gather:
            self.place = members[0].prev
            for node in members:
                for item in chain(node)[:-1]:
                    self.place.append(item)
                    self.place = item
        else:
            self.place = members[-1]

    def send(self) -> Node:
        flat = [self._flat(node) for node in self.members]
        sizes = [record(node).shape[-1] for node in flat]
        total, head = sum(sizes), self.members[-1]
        like = record(head)
        if self.scatter:
            joined = self._add(aten.cat.default, flat, 1, like=like, shape=(self.count, total))
            sent = self._add(spmd.reduce_scatter, joined, head.args[1], 0, head.args[3], like=self._about(like), shape=(1, total))
        else:
            joined = self._add(aten.cat.default, flat, like=like, shape=(total,))
            rest, rows = ([0], self.count) if self.gather else (head.args[2:], 1)
            sent = self._add(head.target, joined, head.args[1], *rest, like=self._about(like), shape=(rows * total,))
        rows = self.count if self.gather else 1
        apart = self._add(aten.reshape.default, sent, [rows, total], like=like, shape=(rows, total))
        start = 0
        for node, size in zip(self.members, sizes, strict=True):
            piece = self._add(aten.slice.Tensor, apart, 1, start, start + size, like=record(node), shape=(rows, size))
            node.replace_all_uses_with(self._unpacked(node, piece))
            self.graph.erase_node(node)
            start += size
        return sent

    def _about(self, like: Record) -> Record:
        what = "gathers" if self.gather else "reductions"
        reasons = list(dict.fromkeys(record(node).reason for node in self.members))  # each stays on the piece that is cut from the result
        more = f", and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        said = f"{len(self.members)} {what} together: {' | '.join(reasons[:2])}{more}"
        return Record((), like.dtype, None, like.source, said, like.phase)

    def _add(self, target: Any, *args: Any, like: Record, shape: tuple[int, ...], final: bool = False) -> Node:
        made = Record(shape, like.dtype, like.sharding if final else None, like.source, like.reason, like.phase)
        with self.graph.inserting_after(self.place):
            self.place = call(self.graph, made, target, *args)
        return self.place

    def _flat(self, node: Node) -> Node:
        """A member's operand as a vector; for a reduce-scatter as a matrix with a row for each rank."""
        operand, like = node.args[0], record(node)
        if not self.scatter:
            size = prod(like.shape) // (self.count if self.gather else 1)
            return self._add(aten.reshape.default, operand, [-1], like=like, shape=(size,))
        dim, size = node.args[2], prod(like.shape)
        assert isinstance(dim, int)
        if prod(like.shape[:dim]) != 1:
            split = [*like.shape[:dim], self.count, *like.shape[dim:]]
            operand = self._add(aten.reshape.default, operand, split, like=like, shape=tuple(split))
            turn = [dim, *range(dim), *range(dim + 1, len(split))]
            operand = self._add(aten.permute.default, operand, turn, like=like, shape=tuple(split[i] for i in turn))
        return self._add(aten.reshape.default, operand, [self.count, size], like=like, shape=(self.count, size))

    def _unpacked(self, node: Node, piece: Node) -> Node:
        """What the member gave, from its part of the bundle: [1 or a row for each rank, size]."""
        like = record(node)
        dim = node.args[2] if self.gather else 0
        assert isinstance(dim, int)
        if self.gather and prod(like.shape[:dim]) != 1:
            tile = [*like.shape[:dim], like.shape[dim] // self.count, *like.shape[dim + 1 :]]
            piece = self._add(aten.reshape.default, piece, [self.count, *tile], like=like, shape=(self.count, *tile))
            turn = [*range(1, dim + 1), 0, *range(dim + 1, len(tile) + 1)]
            piece = self._add(aten.permute.default, piece, turn, like=like, shape=tuple([self.count, *tile][i] for i in turn))
        return self._add(aten.reshape.default, piece, list(like.shape), like=like, shape=like.shape, final=True)
