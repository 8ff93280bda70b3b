"""Send rows: of the tokens that experts are handed, and of what they make of them, ranks send what is read.

    x = all_gather(tokens, ["ep"], 0);  rows = to_groups(x, own)
    y = from_groups(rows, own);         out = reduce_scatter(y, ["ep"], 0, "sum")
  becomes
    x = gather_rows(tokens, ["ep"], choice, 2, 0.79);  rows = in_slots(x, own)
    y = over_slots(rows, own);                         out = scatter_rows(y, ["ep"], choice, 2, 0.79)

A group reads the rows of tokens that have chosen an expert of its own, and has made nothing of others; all ranks know all choices, which
the experts need in any case. Where a group has most of the tokens, or a message costs more than what is in it, all rows are sent as they
lie: gathered and reduced by the links' fastest way, without sizes that the host must wait for. So it is in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, prod
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.cost.devices import for_mesh
from meshc.cost.links import collective_seconds
from meshc.ir import is_getitem, local_bytes, record, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import call
from meshc.ir.nodes import Record
from meshc.ir.sharding import Part, Sharding
from meshc.passes.phases.lowered import Lowered

aten, meshc = torch.ops.aten, torch.ops.meshc


@dataclass(frozen=True)
class _Choices:
    """Who has chosen what: `choice` of all tokens, along `axes` those of `each` experts from the rank's number times `each` on."""

    choice: Node
    axes: tuple[str, ...]
    each: int
    ranks: int

    @property
    def share(self) -> float:
        """Of tokens that have a choice at a rank, if all are as likely."""
        total, chosen = self.each * self.ranks, record(self.choice).shape[-1]
        return round(1 - comb(total - self.each, chosen) / comb(total, chosen), 4)


HANDED: Final[Mapping[object, Function]] = {
    meshc.to_groups.default: meshc.in_slots.default,
    meshc.to_places.default: meshc.in_places.default,
}
"""What hands tokens to groups of experts, and the same of tokens that each group has."""
BROUGHT: Final[Mapping[object, Function]] = {
    meshc.from_groups.default: meshc.over_slots.default,
    meshc.from_places.default: meshc.over_places.default,
}
"""What adds up over groups, and the same of each group by itself."""
CHOICES: Final = (meshc.group_choices.default, meshc.bounded_choices.default)


def send_rows(lowered: Lowered) -> Lowered:
    """In place of what is gathered and reduced whole, where that is predicted to be faster."""
    for stage in lowered.stages.values():
        found = [node for node in stage.graph.nodes if node.target in HANDED or node.target in BROUGHT]
        for node in found:
            (_handed_out if node.target in HANDED else _brought_back)(lowered, stage.graph, node)
        if found:
            stage.graph.eliminate_dead_code()
    return lowered


def _choices(lowered: Lowered, said: Node) -> _Choices | None:
    """Of what a rank's one group has chosen, as `said` has it, where that is in the same graph."""
    made, sharding = said.args[0] if is_getitem(said) else None, record(said).sharding
    if not isinstance(made, Node) or made.target not in CHOICES or sharding is None:
        return None
    choice, groups, each = made.args[:3]
    axes = tuple(axis for part in sharding.dims[0] for axis in part.axes)
    if groups != 1 or not axes or not isinstance(choice, Node) or not isinstance(each, int):
        return None
    return _Choices(choice, axes, each, prod(lowered.sizes[axis] for axis in axes))


def _handed_out(lowered: Lowered, graph: Graph, node: Node) -> None:
    x, said, *rest = node.args
    assert isinstance(x, Node) and isinstance(said, Node)
    found, gather = _choices(lowered, said), _through(x)
    if found is None or gather.target is not spmd.all_gather or gather.args[1:] != ([*found.axes], 0):
        return
    local, made, lies = gather.args[0], record(node), record(x).sharding
    assert isinstance(local, Node) and made.sharding is not None and lies is not None
    *several, width = record(x).shape
    tokens, of_group = prod(several), made.sharding.dims[0]
    if tokens != prod(record(found.choice).shape[:-1]):  # weights, of which each choice has one
        return
    with graph.inserting_before(node):
        flat_lies = Sharding((_joined(lies), lies.dims[-1]))
        flat = _flat(graph, local, [tokens // found.ranks, width], replace(record(gather), sharding=_split(flat_lies, found.axes)))
        like = replace(record(gather), sharding=Sharding((of_group, _joined(lies), lies.dims[-1])))
        sent = _call(graph, replace(like, shape=(1, tokens, width)), spmd.gather_rows, flat, found, tokens)
        if not _pays(lowered, sent, gather):
            return graph.erase_node(sent)
        whole = _flat(graph, sent, [1, *several, width], replace(like, sharding=Sharding((of_group, *lies.dims))))
        node.replace_all_uses_with(call(graph, made, HANDED[node.target], whole, said, *rest))


def _brought_back(lowered: Lowered, graph: Graph, node: Node) -> None:
    rows, said, *rest = node.args
    assert isinstance(rows, Node) and isinstance(said, Node)
    found, scatter = _choices(lowered, said), _only_reader(node)
    if found is None or scatter.target is not spmd.reduce_scatter or scatter.args[1:] != ([*found.axes], 0, "sum"):
        return
    made, of_group = record(node), record(rows).sharding
    assert of_group is not None and made.sharding is not None
    *several, width = made.shape
    tokens, lies = prod(several), made.sharding
    if tokens != prod(record(found.choice).shape[:-1]):
        return
    owed = tuple(one for one in lies.pending if one[0] not in found.axes)
    with graph.inserting_before(scatter):
        by_group = Sharding((of_group.dims[0], *lies.dims), owed)
        summed = call(graph, replace(made, shape=(1, *several, width), sharding=by_group), BROUGHT[node.target], rows, said, *rest)
        joined = Sharding((of_group.dims[0], _joined(lies), lies.dims[-1]), owed)
        flat = _flat(graph, summed, [1, tokens, width], replace(made, sharding=joined))
        split = _split(Sharding((_joined(lies), lies.dims[-1]), owed), found.axes)
        there = replace(record(scatter), shape=(tokens // found.ranks, width), sharding=split)
        sent = _call(graph, there, spmd.scatter_rows, flat, found, tokens)
        if _pays(lowered, sent, scatter):
            scatter.replace_all_uses_with(_flat(graph, sent, record(scatter).shape, record(scatter)))
        else:
            graph.erase_node(sent)


def _call(graph: Graph, made: Record, kind: Function, x: Node, found: _Choices, tokens: int) -> Node:
    """Rows that go where `found` says."""
    choice = found.choice
    like = record(choice)
    joined = None if like.sharding is None else Sharding((_joined(like.sharding), like.sharding.dims[-1]))
    flat = _flat(graph, choice, [tokens, like.shape[-1]], replace(like, sharding=joined))
    return call(graph, made, kind, x, [*found.axes], flat, found.each, found.share)


def _joined(sharding: Sharding) -> tuple[Part, ...]:
    """The parts of all dims but the last, as one dim."""
    return tuple(part for dim in sharding.dims[:-1] for part in dim)


def _through(x: Node) -> Node:
    """What a value is under another shape, and nothing else."""
    while x.target is aten.reshape.default and isinstance(x.args[0], Node) and _rows_stay(x.args[0], x):
        x = x.args[0]
    return x


def _only_reader(x: Node) -> Node:
    """What reads a value, through other shapes of it; the last of these that has several readers, if one has."""
    while len(x.users) == 1:
        (reader,) = x.users
        if reader.target is not aten.reshape.default or not _rows_stay(x, reader):
            return reader
        x = reader
    return x


def _rows_stay(one: Node, other: Node) -> bool:
    """Whether both end in the same dim, and begin with tokens: tiles along dim 0 of one are tiles along dim 0 of the other."""
    return record(one).shape[-1:] == record(other).shape[-1:]


def _split(sharding: Sharding | None, axes: tuple[str, ...]) -> Sharding | None:
    """With the outermost factor of dim 0 split by these axes too."""
    if sharding is None or not sharding.dims[0]:
        return None
    part: Part = sharding.dims[0][0]
    return replace(sharding.with_axes(0, 0, (*part.axes, *axes)), zero=frozenset())


def _flat(graph: Graph, x: Node, shape: Sequence[int], like: Record) -> Node:
    if tuple(record(x).shape) == tuple(shape):
        return x
    return call(graph, replace(like, shape=tuple(shape)), aten.reshape.default, x, list(shape))


def _pays(lowered: Lowered, rows: Node, whole: Node) -> bool:
    """Whether sending rows takes less than sending all, with what they take in memory: they are picked out and put in place."""
    device = for_mesh(lowered.mesh)
    share = rows.args[4]
    assert isinstance(share, float)
    picked = 4 * share * local_bytes(record(rows if rows.target is spmd.gather_rows else rows.all_input_nodes[0])) / device.bytes_per_s
    return collective_seconds(rows, lowered.mesh, device) + picked < collective_seconds(whole, lowered.mesh, device)
