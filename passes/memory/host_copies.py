"""Copies to the host and back, inserted in a graph, of values that backward reads; and the values that it reads too soon for them.

    forward   h = mm(x, w);  y = f(t(h))                       h = mm(x, w);  y = f(t(h));  offloaded = to_host(h)
    backward  g = mm(t(h), gy)                        becomes  back = from_host(offloaded);  g = mm(t(back), gy)

A copy to the host starts after the last reader in forward of any value that shares the memory; views are taken again of the copy that comes
back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from meshc.cost.devices import Device
from meshc.cost.links import copy_seconds
from meshc.cost.roofline import start_seconds
from meshc.ir import Record, is_getitem, is_tensor, local_bytes, phase_of, record, spmd, update, value_of
from meshc.ir.graph import call, copied_node
from meshc.ir.schemas import returns_view
from meshc.program.packing import is_view


def roots_of(calls: Sequence[Node]) -> dict[Node, Node]:
    """By result of `calls`, the value that owns its memory: the result itself, or the value that it is a view of."""
    found: dict[Node, Node] = {}
    for node in calls:
        if not is_tensor(node):
            continue
        under = _viewed_value(node)
        if under is None:
            found[node] = node
        elif under in found:
            found[node] = found[under]
    return found


def _viewed_value(node: Node) -> Node | None:
    """The value that `node` is a view of; None if `node` has memory of its own."""
    if not is_getitem(node):
        return node.all_input_nodes[0] if is_view(node) else None
    producer = value_of(node)[0]
    shares = isinstance(producer.target, torch._ops.OpOverload) and returns_view(producer.target)
    return producer.all_input_nodes[0] if shares else None


def has_known_size(made: Record) -> bool:
    """Whether a value takes memory, of a known size."""
    return bool(made.shape) and made.used is None


def read_too_soon(graph: Graph, values: Collection[Node], home: Mapping[Node, Node], device: Device) -> set[Node]:
    """Those of `values` that backward reads before they could be copied to the host and back over an otherwise idle link. None for a device
    that is its own host, where no copy is hidden in any case. `home`: from `roots_of`."""
    if device.host is None or not values:
        return set()
    at = start_seconds(graph.nodes, device)
    last: dict[Node, float] = {}
    first: dict[Node, float] = {}
    for node, root in home.items():
        for user in node.users if root in values else ():
            if phase_of(user) == "backward":
                first[root] = min(first.get(root, at[user]), at[user])
            elif user.op == "call_function":
                last[root] = max(last.get(root, at[user]), at[user])
    there_and_back = {node: 2 * copy_seconds(local_bytes(record(node)), device) for node in values}
    return {node for node in values if first[node] - last.get(node, at[node]) < there_and_back[node]}


def offload_values(graph: Graph, values: Mapping[Node, str], home: Mapping[Node, Node], backward: Sequence[Node]) -> None:
    """In place: keeps `values` on the host while nothing reads them, each with its reason; `backward` reads the copies that come back.
    `home`: from `roots_of`."""
    inside: dict[Node, set[Node]] = defaultdict(set)
    for node, root in home.items():
        inside[root].add(node)
    for node, why in values.items():
        _offload_value(graph, node, inside[node], backward, why)


def _offload_value(graph: Graph, node: Node, inside: set[Node], backward: Sequence[Node], why: str) -> None:
    """`inside`: the values in the memory of `node`, itself included."""
    late = set(backward)
    readers = [user for one in inside for user in one.users if user.op == "call_function" and user not in late]
    last = max([node, *inside, *readers])
    while last.next.op == "call_function" and is_getitem(last.next):  # results directly follow their call
        last = last.next
    made = record(node)
    with graph.inserting_after(last):
        offloaded = call(graph, replace(made, storage="host", reason=why, returned_by=()), spmd.to_host, node)
    again: dict[Node, Node] = {}
    for reader in backward:
        for operand in reader.all_input_nodes:
            if operand not in inside:
                continue
            with graph.inserting_before(reader):
                if not again:
                    again[node] = call(graph, replace(made, phase="backward", reason=why, returned_by=()), spmd.from_host, offloaded)
                reader.replace_input_with(operand, _copy_view(graph, operand, again))


def _copy_view(graph: Graph, node: Node, again: dict[Node, Node]) -> Node:
    """A copy of a view, of the value that has come back. Its other operands are in memory anyway."""
    if node not in again:
        above = [node, value_of(node)[0]] if is_getitem(node) else [node]
        under = _viewed_value(node)
        assert under is not None
        _copy_view(graph, under, again)
        for one in reversed(above):
            if one not in again:
                again[one] = copied_node(graph, one, lambda operand: again.get(operand, operand))
                update(again[one], phase="backward", returned_by=())
    return again[node]
