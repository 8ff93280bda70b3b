"""Dispatch and combine: tokens travel only to the ranks whose experts they chose, and back.

    x = all_gather(tokens, ["ep"], 0);  rows = to_groups(x, own)
    y = from_groups(rows, own);         out = reduce_scatter(y, ["ep"], 0, "sum")
  becomes
    x = gather_rows(tokens, ["ep"], choice, 2, 0.79);  rows = in_slots(x, own)
    y = over_slots(rows, own);                         out = scatter_rows(y, ["ep"], choice, 2, 0.79)

A group of experts reads the rows of tokens that chose one of its experts, and returns nothing for others; all ranks know all choices, which
the experts need in any case. Where most tokens go to a group, or messages are small, all rows are sent instead: an all-gather and a
reduce-scatter, without sizes that the host must wait for. So it is in a CUDA graph. Where the axes lead between nodes and inside them, rows
may travel in two hops (`dispatch_hops.py`), as `Options(experts=Experts(dispatch=))` or the cost model decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.cost.devices import devices_of
from meshc.cost.links import across_and_inside, collective_seconds
from meshc.errors import PlanError
from meshc.ir import is_getitem, local_bytes, phase_of, record, spmd
from meshc.ir.functions import Function
from meshc.ir.graph import ancestors_of, call, descendants_of, put_in_order
from meshc.ir.nodes import Record
from meshc.ir.sharding import Part, Sharding
from meshc.passes.lower.dispatch_hops import Choices, DispatchHops, leading_parts
from meshc.passes.phases.lowered_program import LoweredProgram

aten, meshc = torch.ops.aten, torch.ops.meshc


HANDED: Final[Mapping[object, Function]] = {
    meshc.to_groups.default: meshc.in_slots.default,
    meshc.to_places.default: meshc.in_places.default,
}
"""Operators that pass tokens to groups of experts, each with its form for tokens that are already grouped."""
BROUGHT: Final[Mapping[object, Function]] = {
    meshc.from_groups.default: meshc.over_slots.default,
    meshc.from_places.default: meshc.over_places.default,
}
"""Operators that add up results over groups of experts, each with its form for one group by itself."""
CHOICES: Final = (meshc.group_choices.default, meshc.bounded_choices.default)


def dispatch_and_combine(lowered: LoweredProgram) -> LoweredProgram:
    """Replaces all-gathers and reduce-scatters of all tokens by dispatch and combine, where that is predicted to be faster."""
    for stage in lowered.stages.values():
        found = [node for node in stage.graph.nodes if node.target in HANDED or node.target in BROUGHT]
        for node in found:
            (_rewrite_dispatch if node.target in HANDED else _rewrite_combine)(lowered, stage.graph, node)
        if found:
            stage.graph.eliminate_dead_code()
            _refuse_flat_dispatch(lowered, stage.graph, found[0])
    return lowered


def _refuse_flat_dispatch(lowered: LoweredProgram, graph: Graph, node: Node) -> None:
    """Raises PlanError if the user asked for hierarchical dispatch and no rows are dispatched."""
    if lowered.request.options.experts.dispatch != "hierarchical" or any(one.target in spmd.OF_ROWS for one in graph.nodes):
        return
    raise PlanError(
        f'Options(experts=Experts(dispatch="hierarchical")): tokens of {record(node).source.module} do not lie along the axes that split '
        "its experts, evenly and behind no other, so that all rows travel\n  what to do: leave the option out; or give a batch that these "
        "axes divide, and a mesh in which they stand behind the others that split it"
    )


def _choices(lowered: LoweredProgram, said: Node) -> Choices | None:
    """The expert choices behind `said`, the local choices of a rank's one group; None if they are not in this graph."""
    made, sharding = said.args[0] if is_getitem(said) else None, record(said).sharding
    if not isinstance(made, Node) or made.target not in CHOICES or sharding is None:
        return None
    choice, groups, each = made.args[:3]
    axes = tuple(axis for part in sharding.dims[0] for axis in part.axes)
    if groups != 1 or not axes or not isinstance(choice, Node) or not isinstance(each, int):
        return None
    return Choices(choice, axes, each, each * prod(lowered.sizes[axis] for axis in axes))


def _rewrite_dispatch(lowered: LoweredProgram, graph: Graph, node: Node) -> None:
    x, said, *rest = node.args
    assert isinstance(x, Node) and isinstance(said, Node)
    found, gather = _choices(lowered, said), _before_reshapes(x)
    if found is None or gather.target is not spmd.all_gather or gather.args[1:] != ([*found.axes], 0):
        return
    local, made, lies = gather.args[0], record(node), record(x).sharding
    assert isinstance(local, Node) and made.sharding is not None and lies is not None
    *several, width = record(x).shape
    tokens, of_group = prod(several), made.sharding.dims[0]
    if tokens != prod(record(found.choice).shape[:-1]):  # weights, of which each choice has one
        return
    beside = weights_for_dispatch(said, gather, node)
    with graph.inserting_before(node):
        flat_lies = Sharding((leading_parts(lies), lies.dims[-1]))
        there = [tokens * found.each // found.experts, width]
        flat = _flat(graph, local, there, replace(record(gather), sharding=_split_rows(flat_lies, found.axes)))
        like = replace(record(gather), sharding=Sharding((of_group, leading_parts(lies), lies.dims[-1])))
        sent = _cheapest_exchange(
            lowered, gather, DispatchHops(graph, lowered.sizes, found), flat, replace(like, shape=(1, tokens, width)), beside
        )
        if sent is None:
            return
        whole = _flat(graph, sent, [1, *several, width], replace(like, sharding=Sharding((of_group, *lies.dims))))
        node.replace_all_uses_with(call(graph, made, HANDED[node.target], whole, said, *rest))


def _rewrite_combine(lowered: LoweredProgram, graph: Graph, node: Node) -> None:
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
    beside = weights_for_combine(said, scatter)
    owed = tuple(one for one in lies.partial if one[0] not in found.axes)
    with graph.inserting_before(scatter):
        by_group = Sharding((of_group.dims[0], *lies.dims), owed)
        summed = call(graph, replace(made, shape=(1, *several, width), sharding=by_group), BROUGHT[node.target], rows, said, *rest)
        by_row = Sharding((of_group.dims[0], leading_parts(lies), lies.dims[-1]), owed)
        flat = _flat(graph, summed, [1, tokens, width], replace(made, sharding=by_row))
        split = _split_rows(Sharding((leading_parts(lies), lies.dims[-1]), owed), found.axes)
        there = replace(record(scatter), shape=(tokens * found.each // found.experts, width), sharding=split)
        sent = _cheapest_exchange(lowered, scatter, DispatchHops(graph, lowered.sizes, found), flat, there, beside)
        if sent is not None:
            scatter.replace_all_uses_with(_flat(graph, sent, record(scatter).shape, record(scatter)))


def _cheapest_exchange(
    lowered: LoweredProgram, whole: Node, hops: DispatchHops, rows: Node, made: Record, beside: RoutingWeights | None
) -> Node | None:
    """Emits the fastest exchange of `rows`, with the weights `beside` them, in place of the collective `whole` over all rows; None if
    `whole` is predicted to be faster."""
    device, asked = devices_of(lowered.mesh).slowest(), lowered.request.options.experts.dispatch
    parts = None if asked == "flat" else across_and_inside(lowered.mesh, hops.found.axes, device)
    gathers = whole.target is spmd.all_gather
    both, brought = rows, made
    if beside is not None:
        both = concatenate_weights(hops.graph, rows, beside)
        brought = replace(made, shape=(*made.shape[:-1], record(both).shape[-1]), sharding=None)
    ways: list[Sequence[Node]] = []
    if parts is not None:
        ways.append((hops.dispatch_by_node if gathers else hops.combine_by_node)(both, brought, parts))
    if parts is None or asked != "hierarchical":
        ways.append((hops.dispatch if gathers else hops.combine)(both, brought))
    taken = [sum(_seconds(lowered, node) for node in way if node.target in spmd.OF_ROWS) for way in ways]
    least = min(taken)
    forced = parts is not None and asked == "hierarchical"
    if not forced and least >= collective_seconds(whole, lowered.mesh, device):
        return None
    sent = ways[taken.index(least)][-1]
    return sent if beside is None else split_weights(hops.graph, sent, made, beside)


def _before_reshapes(x: Node) -> Node:
    """The value below reshapes that keep its rows."""
    while x.target is aten.reshape.default and isinstance(x.args[0], Node) and _rows_stay(x.args[0], x):
        x = x.args[0]
    return x


def _only_reader(x: Node) -> Node:
    """The only reader of a value, behind reshapes that keep its rows; the first reshape with several readers, if there is one."""
    while len(x.users) == 1:
        (reader,) = x.users
        if reader.target is not aten.reshape.default or not _rows_stay(x, reader):
            return reader
        x = reader
    return x


def _rows_stay(one: Node, other: Node) -> bool:
    """Whether both have the same last dim, so that tiles along dim 0 of one are tiles along dim 0 of the other."""
    return record(one).shape[-1:] == record(other).shape[-1:]


def _split_rows(sharding: Sharding | None, axes: tuple[str, ...]) -> Sharding | None:
    """The sharding with the outermost factor of dim 0 split by these axes too."""
    if sharding is None or not sharding.dims[0]:
        return None
    part: Part = sharding.dims[0][0]
    return replace(sharding.with_axes(0, 0, (*part.axes, *axes)), zero=frozenset())


def _flat(graph: Graph, x: Node, shape: Sequence[int], like: Record) -> Node:
    if tuple(record(x).shape) == tuple(shape):
        return x
    return call(graph, replace(like, shape=tuple(shape)), aten.reshape.default, x, list(shape))


def _seconds(lowered: LoweredProgram, rows: Node) -> float:
    """Seconds of an exchange of rows: the collective, and the memory traffic of picking rows out and putting them in place."""
    device = devices_of(lowered.mesh).slowest()
    share = rows.args[4]
    assert isinstance(share, float)
    picked = 4 * share * local_bytes(record(rows if rows.target is spmd.gather_rows else rows.all_input_nodes[0])) / device.bytes_per_s
    return collective_seconds(rows, lowered.mesh, device) + picked


# Routing weights in the messages of dispatch and combine: one message for a token's row and its weights, or their gradients.
#
#     x = gather_rows(tokens, ["ep"], choice, ..)      w = all_gather(weights, ["ep"], 0)      weights_of_groups(w, own, slot)
#   becomes
#     both = gather_rows(cat([tokens, weights], 1), ["ep"], choice, ..)      x = both[.., :h]      w = both[.., h:]
#
#     dx = scatter_rows(y, ["ep"], choice, ..)         dw = reduce_scatter(weights_to_tokens(..), ["ep"], 0, "sum")
#   becomes
#     both = scatter_rows(cat([y, weights_to_tokens(..)], 2), ["ep"], choice, ..)      dx = both[:, :h]      dw = both[:, h:]
#
# A rank reads the weights of tokens that chose one of its experts; its part of the gradient is zero for others, as for rows.


@dataclass(frozen=True)
class RoutingWeights:
    """Routing weights, or their gradient, that can travel with rows. `local`: a rank's own, [t, k] or [n * t, k]; `whole`: the collective
    that becomes unnecessary."""

    local: Node
    whole: Node

    @property
    def width(self) -> int:
        return record(self.local).shape[-1]


def weights_for_dispatch(said: Node, gather: Node, before: Node) -> RoutingWeights | None:
    """The routing weights of the choices `said` that can travel with the rows of `gather`; None if there are none. Moves the nodes that
    compute them before `before`, and their readers behind it."""
    found = [node for node in _readers_of_choices(said, meshc.weights_of_groups.default) if record(node).phase == record(before).phase]
    whole = found[0].args[0] if found else None
    if not isinstance(whole, Node) or whole.target is not spmd.all_gather or whole.args[1:] != gather.args[1:]:
        return None
    if not set(whole.users) <= set(found):
        return None
    return _matching_weights(RoutingWeights(_operand(whole), whole), gather, before)


def weights_for_combine(said: Node, scatter: Node) -> RoutingWeights | None:
    """The gradient of the routing weights that can travel with the rows of `scatter`; None if there is none. Moves it before `scatter`."""
    found = [node for node in _readers_of_choices(said, meshc.weights_to_tokens.default) if record(node).phase == record(scatter).phase]
    whole = next(iter(found[0].users)) if len(found) == 1 and len(found[0].users) == 1 else None
    if whole is None or whole.target is not spmd.reduce_scatter or whole.args[1:] != scatter.args[1:]:
        return None
    return _matching_weights(RoutingWeights(found[0], whole), scatter, scatter)


def concatenate_weights(graph: Graph, rows: Node, weights: RoutingWeights) -> Node:
    """Rows [.., t, h] and weights, concatenated: [.., t, h + k]."""
    *before, width = record(rows).shape
    like = replace(record(rows), sharding=None)
    local = weights.local
    if record(local).shape[:-1] != tuple(before):
        local = call(graph, replace(like, shape=(*before, weights.width)), aten.reshape.default, local, [*before, weights.width])
    return call(graph, replace(like, shape=(*before, width + weights.width)), aten.cat.default, [rows, local], len(before))


def split_weights(graph: Graph, both: Node, made: Record, weights: RoutingWeights) -> Node:
    """The rows, with record `made`, of a received concatenation. Readers of the weights read their slice of it."""
    dim, width = len(made.shape) - 1, made.shape[-1]
    rows = call(graph, made, aten.slice.Tensor, both, dim, 0, width)
    like = record(weights.whole)
    behind = replace(like, shape=(*made.shape[:-1], weights.width), sharding=None)
    cut = call(graph, behind, aten.slice.Tensor, both, dim, width, width + weights.width)
    weights.whole.replace_all_uses_with(call(graph, like, aten.reshape.default, cut, list(like.shape)))
    return rows


def _readers_of_choices(said: Node, kind: object) -> list[Node]:
    """The calls of a kind that take the same choices."""
    choices = said.args[0]
    assert isinstance(choices, Node)
    named = [each for each in choices.users if is_getitem(each) and each.args[1] == 0]
    return [node for each in named for node in each.users if node.target is kind]


def _operand(node: Node) -> Node:
    (operand, *_) = node.all_input_nodes
    return operand


def _matching_weights(weights: RoutingWeights, beside: Node, point: Node) -> RoutingWeights | None:
    """`weights` if they have the rows' dtype, phase and partial axes, and the order around `point` allows it; else None."""
    local, rows = record(weights.local), record(_operand(beside))
    if local.dtype != rows.dtype or record(weights.local).phase != record(beside).phase:
        return None
    if (local.sharding is None) != (rows.sharding is None):
        return None
    if local.sharding is not None and rows.sharding is not None and local.sharding.partial != rows.sharding.partial:
        return None
    return weights if _make_order(weights, point) else None


def _make_order(weights: RoutingWeights, point: Node) -> bool:
    """Moves the nodes that compute `weights` before `point`, and their readers behind it. False, with nothing moved, if that is
    impossible."""
    late = sorted(node for node in ancestors_of([weights.local], lambda node: node > point) if node >= point)
    early = sorted(node for node in descendants_of([weights.whole], lambda node: node < point) - {weights.whole} if node < point)
    read = ancestors_of([point], lambda node: bool(early) and node > early[0])
    if point in late or any(phase_of(node) != phase_of(point) for node in (*late, *early)) or not read.keys().isdisjoint(early):
        return False
    for node in late:
        point.prepend(node)
    put_in_order([point, *early])
    return True
