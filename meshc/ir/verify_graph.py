"""Structural verifier of graphs, run after every pass; its errors name the pass, the value and the user's line.

- Nodes are in topological order: an operand is earlier in the same graph, and lists the node among its users.
- Placeholders come first, one for each input port; one output comes last, with one result for each output port.
- A call has a record for each result; a `getitem` has the record of its result. The shape of a record is that of its sharding: global, or
  on a rank the tile's.
- A call's arguments match its operator's schema; the shape of a collective's record is that of its result.
- A reader of a value with used rows treats each row by itself.
- Ranks that run different graphs issue the same collectives in the same order.

Each node is looked at once. No operator is run, and no numerics are checked (`MESHC_VERIFY` does that).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from torch.fx import Graph, Node

from meshc.ir import spmd, used_rows_dims
from meshc.ir.nodes import KEY, Record
from meshc.ir.sharding import local_shape
from meshc.private import OpOverload

MOVING: Final = frozenset((*spmd.COLLECTIVES.values(), spmd.shard))
"""Calls whose result shape depends on the sizes of mesh axes."""
NO_TENSORS: Final = (str, list, tuple, dict, slice)
"""Types that torch does not accept as a tensor argument; it does accept numbers."""


class MalformedGraph(Exception):
    """A graph's structure is broken."""


def verify_order(graph: Graph) -> list[Node]:
    """The nodes of a graph. Raises MalformedGraph if they are not in topological order, or the graph does not end in one output."""
    nodes = list(graph.nodes)
    seen: set[Node] = set()
    reads = 0
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                raise MalformedGraph(f"it reads {operand.name}, which {_order_fault(operand, graph)}")
            if node not in operand.users:
                raise MalformedGraph(f"{operand.name} does not know that it is read here")
            reads += 1
        seen.add(node)
    if not nodes or nodes[-1].op != "output" or sum(node.op == "output" for node in nodes[-2:]) > 1:
        raise MalformedGraph("the graph does not end in one output")
    if reads != sum(len(node.users) for node in nodes):
        _refuse_strangers(nodes)
    return nodes


def verify_graph(
    graph: Graph, inputs: int, outputs: int, sizes: Mapping[str, int] | None = None, known: Collection[int] = frozenset()
) -> None:
    """Verifies a graph of operators with `inputs` and `outputs` ports. Raises MalformedGraph.

    sizes  of the mesh's axes, if the graph is per-rank; None for the global view
    known  ids of records whose shapes have been verified before: passes keep most records
    """
    nodes = verify_order(graph)
    entered = 0
    offloaded: set[Node] = set()
    of_rows: set[Node] = set()
    for node in nodes:
        if offloaded and node.op == "call_function" and not offloaded.isdisjoint(node.all_input_nodes):
            _verify_side(node, offloaded)
        if node.op == "call_function":
            if node.target is operator.getitem:
                _verify_item(node)
            else:
                _verify_call(node, sizes)
        elif node.op == "placeholder":
            entered += 1
            if node is not nodes[entered - 1]:
                raise MalformedGraph("it enters the graph behind a call")
        elif node.op == "output":
            _verify_end(node, outputs)
            break
        else:
            raise MalformedGraph(f"a graph of operators has no {node.op}")
        found = node.meta.get(KEY)
        for record in found if type(found) is tuple else (found,):
            if type(record) is not Record:
                raise MalformedGraph("it has no record" if record is None else f"its record is a {type(record).__name__}")
            if record.storage != "device":
                offloaded.add(node)
            if record.used is not None:
                of_rows.add(node)
            if (sharding := record.sharding) is None or id(record) in known:
                continue
            wanted = sharding.shape if sizes is None else local_shape(sharding, sizes)
            if record.shape != wanted:
                raise MalformedGraph(f"its record says {list(record.shape)}, and the tile of its sharding {sharding} is {list(wanted)}")
    for node in dict.fromkeys(one for rows in of_rows for one in (rows, *rows.users)):
        if why := used_rows_dims.fault(node):
            raise MalformedGraph(f"{node.name}: {why}")
    if entered != inputs:
        raise MalformedGraph(f"{entered} values enter the graph, and there are {inputs} ports for them")


def verify_meetings(graphs: Mapping[str, Graph], ranks: Iterable[Collection[str]]) -> None:
    """Raises MalformedGraph unless the graphs of all ranks have the same collectives between pipeline stages, in the same order. `ranks`:
    the names of the graphs that each rank of a pipeline runs once a call."""
    before: tuple[Collection[str], list[tuple[Node, tuple[object, ...]]]] | None = None
    for names in ranks:
        found = [(node, _meeting(node)) for name in names for node in graphs[name].nodes if spmd.joins_stages(node)]
        if before is not None:
            _compare(before[1], found, f"{', '.join(before[0])} and {', '.join(names)}")
        before = names, found


def _order_fault(operand: Node, graph: Graph) -> str:
    if operand.graph is not graph:
        return "is of another graph"
    return "stands behind it" if operand in set(graph.nodes) else "has been erased"


def _refuse_strangers(nodes: list[Node]) -> None:
    for node in nodes:
        for user in node.users:
            if node not in user.all_input_nodes or user not in set(nodes):
                raise MalformedGraph(f"{user.name} counts as a reader and does not read it")


def _verify_end(node: Node, outputs: int) -> None:
    given = node.args[0]
    if not isinstance(given, tuple | list):
        raise MalformedGraph("the graph gives a value that is no list of results")
    if len(given) != outputs:
        raise MalformedGraph(f"{len(given)} values leave the graph, and there are {outputs} ports for them")
    for position, value in enumerate(given):
        if not isinstance(value, Node) or type(value.meta.get(KEY)) is not Record:
            raise MalformedGraph(f"result {position} is {value!r}, and no single value")


def _verify_item(node: Node) -> None:
    made, index = node.args[0], node.args[1]
    rows = made.meta.get(KEY) if isinstance(made, Node) else None
    if type(rows) is not tuple or type(index) is not int or not 0 <= index < len(rows):
        raise MalformedGraph(f"it reads result {index} of {made!r}, which makes {len(rows) if type(rows) is tuple else 'one value'}")
    mine, row = node.meta.get(KEY), rows[index]
    if type(mine) is Record and (mine.shape != row.shape or mine.dtype is not row.dtype):
        raise MalformedGraph(f"its record says {_record_text(mine)}, and that of {made!r} {_record_text(row)}")


def _verify_call(node: Node, sizes: Mapping[str, int] | None) -> None:
    target = node.target
    if isinstance(target, OpOverload):
        _verify_arguments(node, _signature(target))
    elif target in MOVING:
        if sizes is None:
            raise MalformedGraph("a graph of one device has no collectives")
        _verify_collective(node, sizes)
    elif spmd.is_host_copy(target):
        _verify_host_copy(node)
    elif target not in spmd.FUNCTIONS.values():
        raise MalformedGraph(f"it calls {target!r}, which is no operator")
    if type(node.meta.get(KEY)) is tuple:
        for user in node.users:
            if user.target is not operator.getitem:
                raise MalformedGraph(f"it makes several values, and {user.name} reads them as one")


@dataclass(frozen=True)
class Signature:
    """An operator's schema: names of arguments, count of positional ones, (position, name) of required ones, positions of tensors."""

    names: tuple[str, ...]
    positional: int
    required: tuple[tuple[int, str], ...]
    tensors: tuple[int, ...]


@cache
def _signature(target: OpOverload) -> Signature:
    rows = target._schema.arguments
    plain = [row for row in rows if not row.kwarg_only]
    return Signature(
        tuple(row.name for row in rows),
        len(plain),
        tuple((place, row.name) for place, row in enumerate(rows) if not row.has_default_value()),
        tuple(place for place, row in enumerate(plain) if row.type.kind() == "TensorType"),
    )


def _verify_arguments(node: Node, has: Signature) -> None:
    args, kwargs = node.args, node.kwargs
    count = len(args)
    if count > has.positional:
        raise MalformedGraph(f"it has {count} arguments, and its operator takes {has.positional} by position")
    for place in has.tensors:
        if place < count:
            value = args[place]
            if value is None or isinstance(value, NO_TENSORS):
                raise MalformedGraph(f"{has.names[place]} is {value!r}, and its operator takes a tensor there")
    if kwargs and not kwargs.keys() <= set(has.names):
        raise MalformedGraph(f"its operator takes no {', '.join(kwargs.keys() - set(has.names))}")
    for place, name in has.required:
        if name not in kwargs and (place >= count or place >= has.positional):
            raise MalformedGraph(f"{name} is missing, which its operator takes")


def _verify_collective(node: Node, sizes: Mapping[str, int]) -> None:
    operand, record = node.args[0], node.meta.get(KEY)
    given = operand.meta.get(KEY) if isinstance(operand, Node) else None
    if type(given) is not Record or given.dtype is None:
        raise MalformedGraph(f"it takes a tensor to other ranks, not {operand!r}")
    if node.target is not spmd.shard:
        axes = node.args[1]
        if not isinstance(axes, tuple | list) or not axes or not all(axis in sizes for axis in axes) or len(set(axes)) != len(axes):
            raise MalformedGraph(f"it goes over {axes!r}, and the axes are {', '.join(sizes)}")
    shape = tuple(spmd.collective_shape(node.target, given.shape, node.args[1:], sizes))
    if type(record) is Record and (record.shape != shape or record.dtype is not given.dtype):
        raise MalformedGraph(f"its record says {_record_text(record)}, and of {_record_text(given)} it makes {list(shape)}")


def _verify_side(node: Node, offloaded: set[Node]) -> None:
    """All operands of an operator are on one side, host or device; only copies go from one to the other."""
    if spmd.is_host_copy(node.target):
        return
    if spmd.is_function(node.target):
        raise MalformedGraph("it reads a value that lies on the host, which only from_host and operators do")
    for operand in node.all_input_nodes:
        found = operand.meta.get(KEY)
        if operand not in offloaded and type(found) is Record and found.dtype is not None:
            raise MalformedGraph(f"it reads {operand.name}, which lies on the device, and others that lie on the host")


def _verify_host_copy(node: Node) -> None:
    """The result of a copy has its operand's shape and dtype, and is on the other side."""
    given = [operand.meta.get(KEY) for operand in node.all_input_nodes]
    out, mine = node.target is spmd.to_host, node.meta.get(KEY)
    if len(given) != len(node.args) or not 1 <= len(given) <= 2:
        raise MalformedGraph(f"it takes a value and, if any, its place on the {'host' if out else 'device'}, not {node.args!r}")
    for record, there in [*zip(given, (not out, out), strict=False), (mine, out)]:
        if type(record) is not Record or type(mine) is not Record or record.shape != mine.shape or record.dtype is not mine.dtype:
            raise MalformedGraph("it copies a value into one of another shape or dtype")
        if (record.storage != "device") != there:
            raise MalformedGraph(f"{'it is' if record is mine else 'it reads'} a value that lies on the {'device' if there else 'host'}")


def _meeting(node: Node) -> tuple[object, ...]:
    record = node.meta[KEY]
    return node.target, str(node.args[1:]), record.shape, record.dtype


def _compare(one: list[tuple[Node, tuple[object, ...]]], other: list[tuple[Node, tuple[object, ...]]], where: str) -> None:
    for (_, mine), (node, theirs) in zip(one, other, strict=False):
        if mine != theirs:
            raise MalformedGraph(f"between pipeline stages {where} meet in different collectives at {node.name}")
    if len(one) != len(other):
        raise MalformedGraph(f"between pipeline stages {where} meet in {len(one)} and {len(other)} collectives")


def _record_text(record: Record) -> str:
    return f"{'an integer' if record.dtype is None else str(record.dtype).removeprefix('torch.')} {list(record.shape)}"
