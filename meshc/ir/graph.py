"""Queries and edits of FX graphs that passes share: placeholders and results, ancestors and descendants, copies, new calls.

    x, w -> t = t(w) -> y = mm(x, t) -> return y        made_of([y]) = {y, t, w, x}        read_by([w]) = {w, t, y}

A copy of a node keeps its record; a call is made together with its record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_aggregate, map_arg

from meshc.ir.functions import Function
from meshc.ir.nodes import Record, set_record


def placeholders(graph: Graph) -> list[Node]:
    """The placeholders in order, which is the order of the input ports."""
    return list(graph.find_nodes(op="placeholder"))


def output_of(graph: Graph) -> Node:
    """The output node."""
    (output,) = graph.find_nodes(op="output")
    return output


def results_of(graph: Graph) -> tuple[Node, ...]:
    """The results of a graph, in the order of its output ports."""
    return tuple(output_of(graph).args[0])  # type: ignore[arg-type]


def set_results(graph: Graph, results: Iterable[Node]) -> None:
    """Replaces the results of a graph that has an output node."""
    output_of(graph).args = (tuple(results),)


def _always(node: Node) -> bool:
    return True


def _reachable_nodes(nodes: Iterable[Node], through: Callable[[Node], bool], onward: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    found: dict[Node, None] = {}
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in found:
            found[node] = None
            if through(node):
                work += onward(node)
    return found


def ancestors_of(nodes: Iterable[Node], through: Callable[[Node], bool] = _always) -> dict[Node, None]:
    """These nodes and all their ancestors. A node for which `through` is false is included, but its operands are not followed."""
    return _reachable_nodes(nodes, through, lambda node: node.all_input_nodes)


def descendants_of(nodes: Iterable[Node], through: Callable[[Node], bool] = _always) -> set[Node]:
    """These nodes and all their descendants. A node for which `through` is false is included, but its users are not followed."""
    return set(_reachable_nodes(nodes, through, lambda node: [user for user in node.users if user.op != "output"]))


def computable_from(graph: Graph, nodes: Collection[Node], through: Callable[[Node], bool] = _always) -> set[Node]:
    """These nodes and the calls that can be computed from them alone. Calls for which `through` is false are included, their users not."""
    found = set(nodes)
    usable = {node for node in found if through(node)}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and usable.issuperset(node.all_input_nodes):
            found.add(node)
            if through(node):
                usable.add(node)
    return found


def put_in_order(nodes: Iterable[Node]) -> None:
    """Moves nodes, in this order, right behind the first of them."""
    for before, node in pairwise(nodes):
        if before.next is not node:
            before.append(node)


def last_reads(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Operand -> the last of these nodes that reads it."""
    return {operand: node for node in nodes for operand in node.all_input_nodes}


def values_freed_after(last: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """Node -> the values whose last reader it is (the inverse of `last_reads`)."""
    found: dict[Node, list[Node]] = defaultdict(list)
    for value, node in last.items():
        found[node].append(value)
    return found


def equal_calls(nodes: Iterable[Node], apart: Callable[[Node], str] = lambda node: "") -> Iterator[tuple[Node, Node]]:
    """Common subexpressions: (call, an earlier equal call), in order. `apart` is a further key that must be equal. The caller may replace
    and erase the call, since its users are compared afterwards. (torch's own pass for this knows neither records nor phases.)"""
    seen: dict[tuple[object, ...], Node] = {}
    for node in list(nodes):
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            # repr keeps 1, 1.0 and True apart, which compare equal
            first = seen.setdefault((node.target, repr(node.args), repr(sorted(node.kwargs.items())), apart(node)), node)
            if first is not node:
                yield node, first


def copied_node(
    graph: Graph, node: Node, there: Callable[[Node], Argument], leaf: Callable[[Argument], Argument] | None = None
) -> Node:  # fmt: skip
    """A copy of another graph's node at this graph's insertion point, record included. `there` maps its operands, or `leaf` each leaf of
    its arguments. Equal to torch's `node_copy`, which searches all arguments for symbolic sizes, absent in graphs of operators."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    _put(made, "args", map_arg(node.args, there) if leaf is None else map_aggregate(node.args, leaf))
    if node.kwargs:
        _put(made, "kwargs", map_arg(node.kwargs, there) if leaf is None else map_aggregate(node.kwargs, leaf))
    made.meta.update(node.meta)
    return made


_put = object.__setattr__
"""Bypasses `Node.__setattr__`, whose table look-up does not depend on the arguments set here."""


def copy_into(graph: Graph, other: Graph, env: dict[Node, Node]) -> Argument:
    """Copies another graph's nodes, except its output, and adds each to `env`. Returns the copied results."""
    for node in other.nodes:
        if node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        env[node] = copied_node(graph, node, env.__getitem__)
    return None


def copy_graph(graph: Graph) -> Graph:
    """A copy of a graph, records included."""
    copy = Graph()
    copy.output(copy_into(copy, graph, {}))
    return copy


def add_placeholder(graph: Graph, like: Node) -> Node:
    """A placeholder for the value of a node of another graph."""
    node = graph.placeholder(like.name)
    node.meta = dict(like.meta)
    return node


def create_call(graph: Graph, target: Function, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> Node:
    """A call at the graph's insertion point: torch's `call_function` without its search for symbolic sizes."""
    made = graph.call_function(target)
    _put(made, "args", args)
    if kwargs:
        _put(made, "kwargs", kwargs)
    return made


def call(graph: Graph, record: Record | tuple[Record, ...], target: Function, *args: Argument, **kwargs: Argument) -> Node:
    """A call with its record, at the graph's insertion point."""
    node = create_call(graph, target, args, kwargs)
    set_record(node, record)
    return node
