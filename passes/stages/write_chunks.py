"""Head and loss of the per-rank graph in chunks of tokens, so that the values of a chunk are freed before the next one begins.

    c = coordinate("in chunks")                                  x_0 = slice(x, 0, 0, 4)
    x_c = shard(x, 0, 2, c)                                      y_0 = mm(x_0, w)
    y_c = mm(x_c, w)                            becomes          gw_0 = mm(t(y_0), x_0);  gx_0 = mm(y_0, v)
    gw = all_reduce(mm(t(y_c), x_c), ["in chunks"], "sum")       x_1 = slice(x, 0, 4, 8)
    gx = all_gather(mm(y_c, v), ["in chunks"], 0)                ...
                                                                 gw = add(gw_0, gw_1);  gx = cat([gx_0, gx_1], 0)

A chunk is a tile along one more axis of the factor that `place/propagate.py` has taken; shardings of its values follow from the operators'
rules, as for a microbatch (docs/decisions/microbatches-and-means.md). Here reductions over chunks become running sums, and gathers over
chunks are concatenated. All of it belongs to backward: forward ends with the operands of the head. The axis is gone afterwards; values of a
chunk have plain types and the chunk's number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from meshc.errors import MeshcError
from meshc.ir import Record, has_record, leaves, record, records, spmd, update
from meshc.ir.graph import call, copied_node, descendants_of, output_of
from meshc.ir.sharding import Sharding
from meshc.ir.spmd import CHUNK
from meshc.passes.phases.lowered_program import LoweredProgram

aten = torch.ops.aten


class NotInChunks(MeshcError):
    """Reason why a head cannot run in chunks, with a line of the model; the head runs whole then."""


def write_chunks(lowered: LoweredProgram) -> LoweredProgram:
    """The program with its head and loss in chunks. Raises NotInChunks if a chunk needs results of all of them, or if the result of all is
    as large as the product itself."""
    chunked = lowered.placed.chunked
    assert chunked is not None
    (stage,) = lowered.stages.values()
    names = lowered.placed.names.of
    _Writer(stage.graph, chunked.count, {names[factor] for factor in chunked.features}).write_all()
    return replace(lowered, sizes={axis: size for axis, size in lowered.sizes.items() if axis != CHUNK})


class _Writer:
    """
    own     the chunk's number;  ends  reductions and gathers over chunks, in order
    varies  nodes that differ between chunks, in order
    """

    def __init__(self, graph: Graph, count: int, features: Collection[str]) -> None:
        self.graph, self.count = graph, count
        nodes = list(graph.nodes)
        self.own = [node for node in nodes if node.target is spmd.coordinate and node.args[0] == CHUNK]
        self.ends = [node for node in nodes if spmd.is_collective(node.target) and CHUNK in node.args[1]]
        ends = set(self.ends)
        among = descendants_of(self.own, through=lambda node: node not in ends) - ends
        self.varies = [node for node in nodes if node in among]
        self.done = descendants_of(self.ends)
        self._refuse(among, features)

    def _refuse(self, varies: Collection[Node], features: Collection[str]) -> None:
        if not self.own:
            raise NotInChunks("no rank has two rows of it to take apart")
        for node in self.ends:
            plain = node.args[1] == [CHUNK] and (node.target is spmd.all_gather or node.args[2] == "sum")
            if not plain or node.target not in (spmd.all_gather, spmd.all_reduce):
                raise NotInChunks(f"{_operator_text(node)} moves values between tokens of several chunks")
            if node.target is spmd.all_gather and any(part.factor in features for _, _, part in _gathered_sharding(node).parts()):
                raise NotInChunks(f"{_operator_text(node)} is wanted whole, which is what the head makes of all tokens")
        for node in (*self.varies, *(node.all_input_nodes[0] for node in self.ends)):
            if node in self.done:
                raise NotInChunks(f"{_operator_text(node)} needs what is made of the tokens of all chunks")
        for value in output_of(self.graph).all_input_nodes:
            if value in varies:
                raise NotInChunks(f"{_operator_text(value)} leaves the step for each token")

    def write_all(self) -> None:
        nodes = list(self.graph.nodes)
        order = {node: turn for turn, node in enumerate(nodes)}
        late = max((*self.varies, *(node.all_input_nodes[0] for node in self.ends)), key=order.__getitem__)
        behind = late.next
        taken = {node: order[node.all_input_nodes[0]] for node in self.ends}  # a part is added as soon as it is computed
        body = sorted((*self.varies, *self.ends), key=lambda node: (taken.get(node, order[node]), node in taken))
        parts: dict[Node, list[Node]] = defaultdict(list)
        for chunk in range(self.count):
            with self.graph.inserting_before(behind):
                self._write(chunk, body, parts)
        for node in nodes[: order[late]]:  # results of all chunks come after the last one
            if node in self.done and node not in parts:
                behind.prepend(node)
        for node in self.ends:
            node.replace_all_uses_with(parts[node][-1])
        for node in reversed(body):
            self.graph.erase_node(node)
        for node in self.graph.nodes:  # values that all chunks read have the shape of one
            if has_record(node) and any(one.sharding is not None and CHUNK in one.sharding.axes() for one in records(node)):
                update(node, sharding=None)

    def _write(self, chunk: int, body: Sequence[Node], parts: dict[Node, list[Node]]) -> None:
        """Writes one chunk. `parts`: by end, its results so far."""
        made: dict[Node, Argument] = dict.fromkeys(self.own, chunk)
        for node in body:
            if node in made:
                continue
            if node not in parts and node not in self.done:
                made[node] = self._copy_into_chunk(node, made, chunk)
                continue
            (operand,) = node.all_input_nodes
            part = made.get(operand, operand)
            assert isinstance(part, Node)
            parts[node].append(self._accumulate(node, part, parts[node], chunk))

    def _copy_into_chunk(self, node: Node, made: Mapping[Node, Argument], chunk: int) -> Argument:
        """The result of `node` in one chunk, of the operands that `made` has for this chunk."""
        given = map_arg(node.args, lambda operand: made.get(operand, operand))
        known = all(not isinstance(leaf, Node) for leaf in leaves(given))
        if known and node.target in (spmd.tile_start, spmd.tile_count):
            return node.target(*given)
        changes: dict[str, Any] = dict(sharding=None, returned_by=(), chunk=chunk)
        if node.target is spmd.shard and node.args[3] in self.own:
            return self._slice_rows(node, cast(Node, given[0]), replace(record(node), **changes), chunk)
        copy = copied_node(self.graph, node, lambda operand: made.get(operand, operand))
        update(copy, **changes)
        return copy

    def _slice_rows(self, node: Node, whole: Node, found: Record, chunk: int) -> Node:
        """A chunk along a dim, filled up with zeros if it is shorter than the others."""
        dim = cast(int, node.args[1])
        size, rows = record(whole).shape[dim], found.shape[dim]
        start, end = min(chunk * rows, size), min((chunk + 1) * rows, size)
        shape = found.shape[:dim], found.shape[dim + 1 :]
        piece = call(self.graph, replace(found, shape=(*shape[0], end - start, *shape[1])), aten.slice.Tensor, whole, dim, start, end)
        if end - start == rows:
            return piece
        return call(self.graph, found, aten.constant_pad_nd.default, piece, [0, 0] * len(shape[1]) + [0, rows - end + start], 0)

    def _accumulate(self, end: Node, part: Node, before: Sequence[Node], chunk: int) -> Node:
        """The result of `end` with one more part: a larger sum, or after the last chunk all rows."""
        last = chunk == self.count - 1
        whole = replace(record(end), chunk=chunk)
        if end.target is spmd.all_gather:
            return call(self.graph, whole, aten.cat.default, [*before, part], end.args[2]) if last else part
        if not before:
            return part
        return call(self.graph, whole if last else replace(whole, sharding=None, of=""), aten.add.Tensor, before[-1], part)


def _gathered_sharding(node: Node) -> Sharding:
    """The sharding of a gather's result, once it has its shape again."""
    while (lies := record(node).sharding) is None and len(node.users) == 1 and next(iter(node.users)).op == "call_function":
        (node,) = node.users
    return lies or Sharding()


def _operator_text(node: Node) -> str:
    found = record(node)
    return f"{found.reason.partition(';')[0] or node.name} at {found.source}"
