"""Rewrite of a stage's graph: small all-reduces, those of gradients, gathers and reduce-scatters are joined into buckets, one message each.

    r1 = all_reduce(g1, ["dp"], "sum")        flat = cat([reshape(g1, [-1]), reshape(g2, [-1])])
    r2 = all_reduce(g2, ["dp"], "sum")        r = all_reduce(flat, ["dp"], "sum")
                                              r1 = reshape(slice(r, 0, 0, 64), [8, 8])   r2 = ...

A message costs tens of microseconds before its first byte moves, with gloo and NCCL alike. Collectives over the same axes that share one:

- all-reduces below SMALL bytes, if none is read before the last can start;
- all-reduces of gradients, in buckets as DistributedDataParallel's (pytorch.org/docs/stable/notes/ddp.html), up to ALONE bytes each;
- gathers of stored values and reduce-scatters of their gradients, where the caller allows it (`together`): the caller decides which
  gathered values are in memory at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from meshc.ir import PHASES, Record, local_bytes, record, records, spmd
from meshc.ir.functions import Function, Target
from meshc.ir.graph import call
from meshc.ir.keys import is_a
from meshc.program.packing import is_view
from meshc.program.preparation import from_placeholder, move_operands_before
from meshc.program.program import Stage

aten = torch.ops.aten

SMALL = 64 * 1024
"""Bytes below which a message costs more in latency than in copying."""

BUCKET = 25 * 1024 * 1024
"""Largest bucket, in bytes: DistributedDataParallel's `bucket_cap_mb`."""

ALONE = 8 * 1024 * 1024
"""Bytes from which a gradient travels alone: a bucket would save nothing, and cost a copy."""

FIRST = 1024 * 1024
"""Gradients of up to twice these bytes are one message; DistributedDataParallel's first bucket has this size."""

BUCKETS = 4
"""Gradient buckets of a model, about. A small model has fewer, but two, of `FIRST` bytes or more, where four would be below `ALONE`."""


class _BucketKey(NamedTuple):
    """The key by which collectives are grouped into buckets."""

    target: Target
    kind: str
    axes: tuple[str, ...]
    reduction_or_phase: object
    dtype: torch.dtype | None
    together: int


@dataclass(frozen=True)
class Bucket:
    """One collective, `sent`, in place of its `members`. `cut`: the nodes that split its result, in order."""

    sent: Node
    members: tuple[Node, ...]
    cut: tuple[Node, ...]


def bucket(
    stage: Stage,
    sizes: Mapping[str, int],
    together: Mapping[Node, int] = MappingProxyType({}),
    limit: int = BUCKET,
    alone: int = ALONE,
    targets: Collection[Function] = (spmd.all_reduce, spmd.reduce_scatter, spmd.all_gather),
    apart: Collection[Node] = (),
) -> list[Bucket]:
    """Joins collectives of a stage into buckets, in place, and returns these. `sizes`: of the mesh's axes.

    together  gather or reduce-scatter -> number: only those of one number may share a bucket
    limit     bytes of a bucket of gathers, reduce-scatters or small all-reduces, at most
    alone     bytes from which a gather or reduce-scatter travels alone
    targets   the kinds of collectives to join
    apart     collectives that are left alone
    """
    order = {node: index for index, node in enumerate(stage.graph.nodes)}
    groups: dict[_BucketKey, list[Node]] = defaultdict(list)
    for node in stage.graph.nodes:
        kind = _kind(node, node in together, alone) if node.target in targets and node not in apart else ""
        if kind:
            alike = record(node).phase if node.target is spmd.all_gather else node.args[-1]  # the reduction
            groups[_BucketKey(node.target, kind, tuple(node.args[1]), alike, record(node).dtype, together.get(node, 0))].append(node)
    planned: list[tuple[list[Node], int]] = []
    for alike, members in groups.items():
        size = _limit(members) if alike.kind == "gradient" else limit
        batches = _batches(members, order, size, reads=alike.kind != "stored")
        planned += [(batch, prod(sizes[axis] for axis in alike.axes)) for batch in batches if len(batch) > 1]
    given = {value for key, value in stage.results().items() if is_a(key, "output", "metric")}
    return [_BucketBuilder(stage.graph, batch, count, given).send() for batch, count in planned]


def whole_bytes(collective: Node) -> int:
    """Bytes of the larger side of a collective: of a gather's result, of a reduction's operand."""
    return local_bytes(record(collective if collective.target is spmd.all_gather else collective.all_input_nodes[0]))


def is_copy(node: Node) -> bool:
    """Whether a reshape copies: that of a member's slice of a gathered bucket, which has a row from each rank."""
    if node.target is not aten.reshape.default:
        return False
    piece = node.args[0]
    if not isinstance(piece, Node) or piece.target is not aten.slice.Tensor or piece.args[1] != 1:
        return False
    (apart,) = piece.all_input_nodes
    of_bucket = apart.target is aten.reshape.default and apart.all_input_nodes[0].target is spmd.all_gather
    return of_bucket and record(piece).shape[0] > 1 and record(piece).shape != record(apart).shape


def _kind(node: Node, named: bool, alone: int) -> str:
    """The kind of bucket that a collective may join: gradient, small, stored, late; "" if none."""
    if not spmd.is_collective(node.target) or node.args[1] == ["mb"] or spmd.joins_stages(node) or not node.users:
        return ""
    if node.target is spmd.all_reduce:
        if _read_late(node) and local_bytes(record(node)) < ALONE:
            return "gradient"
        return "small" if local_bytes(record(node)) <= SMALL else ""
    if not named or whole_bytes(node) >= alone:
        return ""
    if node.target is spmd.all_gather and from_placeholder(node):
        return "stored"
    return "late" if node.target is spmd.reduce_scatter and _read_late(node) else ""


def _read_late(node: Node) -> bool:
    """Whether nothing but an update, or the stage's end, reads a reduction, as with gradients, reduced once or twice."""
    return all(
        user.op == "output" or records(user)[0].phase == "update" or ((is_view(user) or _reduces(user)) and _read_late(user))
        for user in node.users
    )


def _reduces(node: Node) -> bool:
    return node.target in (spmd.all_reduce, spmd.reduce_scatter)


def _limit(gradients: list[Node]) -> int:
    """The bytes of a gradient bucket at most. There are several, so that one travels while the next gradients are computed."""
    total = sum(local_bytes(record(node)) for node in gradients)
    return min(BUCKET, max(FIRST, min(total // 2, max(total // BUCKETS, ALONE)))) if total > 2 * FIRST else total


def _batches(members: list[Node], order: Mapping[Node, int], limit: int, reads: bool) -> list[list[Node]]:
    """Runs of at most `limit` bytes. With `reads`, no member is read before the last of its run can start. No member is read in an earlier
    phase than that in which the last of its run is computed."""
    batches: list[list[Node]] = []
    bytes_so_far = 0
    first_read = 0
    made_in = read_in = 0  # phases, by their places
    for node in members:
        read = min(order[user] for user in node.users)
        made, reading = PHASES.index(record(node).phase), _read_in(node)
        fits = bool(batches) and (order[node] < first_read or not reads) and bytes_so_far + whole_bytes(node) <= limit
        if fits and max(made_in, made) <= min(read_in, reading):
            batches[-1].append(node)
            bytes_so_far += whole_bytes(node)
            first_read, made_in, read_in = min(first_read, read), max(made_in, made), min(read_in, reading)
        else:
            batches.append([node])
            bytes_so_far, first_read, made_in, read_in = whole_bytes(node), read, made, reading
    return batches


def _read_in(node: Node) -> int:
    """The index of the first phase in which a value is read; `len(PHASES)` if only the output reads it."""
    readers = [user for user in node.users if user.op != "output"]
    return min((PHASES.index(records(user)[0].phase) for user in readers), default=len(PHASES))


class _BucketBuilder:
    """Rewrites several collectives of one kind as one: a gather in place of the first of them, a reduction in place of the last.

    given  results that the program returns: a member among them is cloned, since a loss that is kept must not keep the whole bucket alive
    """

    def __init__(self, graph: Graph, members: list[Node], count: int, given: Collection[object] = ()) -> None:
        self.graph, self.members, self.count, self.given = graph, members, count, given
        self.cut: list[Node] = []  # what takes the result apart, once it has been sent
        self.phase = PHASES[max(PHASES.index(record(node).phase) for node in members)]
        self.gather = members[0].target is spmd.all_gather
        self.scatter = members[0].target is spmd.reduce_scatter
        if self.gather:
            for node in members[1:]:
                move_operands_before(node, members[0])
            self.place = members[0].prev
        else:
            self.place = members[-1]

    def send(self) -> Bucket:
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
            sent = self._add(cast(Function, head.target), joined, head.args[1], *rest, like=self._about(like), shape=(rows * total,))
        self.cut.clear()
        rows = self.count if self.gather else 1
        apart = self._add(aten.reshape.default, sent, [rows, total], like=like, shape=(rows, total))
        start = 0
        for node, size in zip(self.members, sizes, strict=True):
            piece = self._add(aten.slice.Tensor, apart, 1, start, start + size, like=record(node), shape=(rows, size))
            node.replace_all_uses_with(self._unpack(node, piece))
            self.graph.erase_node(node)
            start += size
        return Bucket(sent, tuple(self.members), tuple(self.cut))

    def _about(self, like: Record) -> Record:
        what = "gathers" if self.gather else "reductions"
        reasons = list(dict.fromkeys(record(node).reason for node in self.members))  # each stays on the piece that is cut from the result
        more = f", and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        said = f"{len(self.members)} {what} together: {' | '.join(reasons[:2])}{more}"
        return Record((), like.dtype, None, like.source, said, self.phase)

    def _add(self, target: Function, *args: Argument, like: Record, shape: tuple[int, ...], final: bool = False) -> Node:
        made = Record(shape, like.dtype, like.sharding if final else None, like.source, like.reason, self.phase)
        with self.graph.inserting_after(self.place):
            self.place = call(self.graph, made, target, *args)
        self.cut.append(self.place)
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

    def _unpack(self, node: Node, piece: Node) -> Node:
        """A member's result, from its slice of the bucket: [1 or a row for each rank, size]."""
        like = record(node)
        dim = node.args[2] if self.gather else 0
        assert isinstance(dim, int)
        if self.gather and prod(like.shape[:dim]) != 1:
            tile = [*like.shape[:dim], like.shape[dim] // self.count, *like.shape[dim + 1 :]]
            piece = self._add(aten.reshape.default, piece, [self.count, *tile], like=like, shape=(self.count, *tile))
            turn = [*range(1, dim + 1), 0, *range(dim + 1, len(tile) + 1)]
            piece = self._add(aten.permute.default, piece, turn, like=like, shape=tuple([self.count, *tile][i] for i in turn))
        whole = self._add(aten.reshape.default, piece, list(like.shape), like=like, shape=like.shape, final=True)
        return self._add(aten.clone.default, whole, like=like, shape=like.shape, final=True) if node in self.given else whole
