"""Recompute written into backward: copies of forward's operators, each before the first reader of its value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from meshc.ir import comparison_key, records, spmd, update
from meshc.ir.graph import ancestors_of, copied_node


def write_copies(graph: Graph, backward: Sequence[Node], values: Sequence[Node]) -> None:
    """In place: `backward` reads copies of `values` (of forward, in order); a value that nothing in `backward` reads is not copied."""
    again = {node: turn for turn, node in enumerate(values)}
    copies: dict[Node, Node] = {}
    made: dict[tuple[object, ...], list[Node]] = {}
    targets = {node.target for node in again}
    for reader in backward:
        read = [operand for operand in reader.all_input_nodes if operand in again]
        missing = ancestors_of(read, through=lambda node: node in again and node not in copies)
        with graph.inserting_before(reader):
            for node in sorted((node for node in missing if node in again and node not in copies), key=again.__getitem__):
                copies[node] = _copy(graph, node, copies)
                made.setdefault(_call(copies[node]), []).append(copies[node])
        for operand in reader.all_input_nodes:
            if operand in copies:
                reader.replace_input_with(operand, copies[operand])
        twin = _twin(reader, made.get(_call(reader), ())) if reader.target in targets else None  # backward's own gather of a parameter
        if twin is not None:
            reader.replace_all_uses_with(twin)
            graph.erase_node(reader)
    for node in sorted(copies, key=again.__getitem__, reverse=True):
        if not node.users and not spmd.is_collective(node.target):
            graph.erase_node(node)


def _copy(graph: Graph, node: Node, copies: Mapping[Node, Node]) -> Node:
    copy = copied_node(graph, node, lambda operand: copies.get(operand, operand))
    update(copy, phase="backward", returned_by=(), again=True)
    return copy


def _call(node: Node) -> tuple[object, ...]:
    """Key that equal calls share; the other arguments are compared by `_twin`."""
    return node.target, *node.all_input_nodes


def _twin(node: Node, others: Sequence[Node]) -> Node | None:
    """The last of `others` with the arguments of `node` and results of the same sharding: tiles of one position may be in another dim."""
    given = _given(node)
    return next((other for other in reversed(others) if _given(other) == given), None)


def _given(node: Node) -> tuple[object, ...]:
    return comparison_key(node.args), comparison_key(node.kwargs), [record.sharding for record in records(node)]
