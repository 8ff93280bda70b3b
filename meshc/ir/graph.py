"""Queries and edits of FX graphs that passes share: placeholders and results, ancestors and descendants, copies, new calls.

    x, w -> t = t(w) -> y = mm(x, t) -> return y        made_of([y]) = {y, t, w, x}        read_by([w]) = {w, t, y}

A copy of a node keeps its record; a call is made together with its record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_aggregate, map_arg

from meshc.ir.functions import Function
from meshc.ir.nodes import Record, set_record


def placeholders(graph: Graph) -> list[Node]:
    """In their order, which is the order of the ports."""
    return list(graph.find_nodes(op="placeholder"))


def output_of(graph: Graph) -> Node:
    """The node that gives the results."""
    (output,) = graph.find_nodes(op="output")
    return output


def results_of(graph: Graph) -> tuple[Node, ...]:
    """What a graph gives, in the order of its ports."""
    return tuple(output_of(graph).args[0])  # type: ignore[arg-type]


def give(graph: Graph, results: Iterable[Node]) -> None:
    """What a graph that has its end gives from now on."""
    output_of(graph).args = (tuple(results),)


def _always(node: Node) -> bool:
    return True


def made_of(nodes: Iterable[Node], through: Callable[[Node], bool] = _always) -> dict[Node, None]:
    """These nodes and all that they are made of; of what `through` holds back, the node itself but nothing behind it."""
    found: dict[Node, None] = {}
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in found:
            found[node] = None
            if through(node):
                work += node.all_input_nodes
    return found


def read_by(nodes: Iterable[Node], through: Callable[[Node], bool] = _always) -> set[Node]:
    """These nodes and the calls that depend on any of them; of what `through` holds back, the node itself but nothing that reads it."""
    found: set[Node] = set()
    work = list(nodes)
    while work:
        node = work.pop()
        if node not in found:
            found.add(node)
            if through(node):
                work += (user for user in node.users if user.op != "output")
    return found


def made_only_of(graph: Graph, nodes: Collection[Node], through: Callable[[Node], bool] = _always) -> set[Node]:
    """These nodes and the calls that read nothing but what is made of them; what `through` holds back counts; what reads it does not."""
    found = set(nodes)
    usable = {node for node in found if through(node)}
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and usable.issuperset(node.all_input_nodes):
            found.add(node)
            if through(node):
                usable.add(node)
    return found


def last_reads(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Of each value that these nodes read, the last of them that does."""
    return {operand: node for node in nodes for operand in node.all_input_nodes}


def dying(last: Mapping[Node, Node]) -> dict[Node, list[Node]]:
    """What nobody reads after a node, by that node."""
    found: dict[Node, list[Node]] = defaultdict(list)
    for value, node in last.items():
        found[node].append(value)
    return found


def equal_calls(nodes: Iterable[Node], apart: Callable[[Node], str] = lambda node: "") -> Iterator[tuple[Node, Node]]:
    """Each call that is equal to an earlier one, with that one; `apart` says what else must be alike. The caller may replace and erase
    what it is given: what reads it is compared afterwards. (torch's own pass for this knows neither records nor phases.)"""
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
    """A copy of another graph's node where this one inserts, its record included; `there`: what it reads, or `leaf`: what it has for
    anything among its arguments. What torch's own `node_copy` gives, which looks through all arguments for sizes that graphs of operators
    do not hold."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    _put(made, "args", map_arg(node.args, there) if leaf is None else map_aggregate(node.args, leaf))
    if node.kwargs:
        _put(made, "kwargs", map_arg(node.kwargs, there) if leaf is None else map_aggregate(node.kwargs, leaf))
    made.meta.update(node.meta)
    return made


_put = object.__setattr__
"""(A node's own looks for it, by its target, in a table that what it reads makes no difference to.)"""


def copy_into(graph: Graph, other: Graph, env: dict[Node, Node]) -> Argument:
    """Copies all of another graph but its end, which `env` is told of; what its end would give here."""
    for node in other.nodes:
        if node.op == "output":
            return map_arg(node.args[0], env.__getitem__)
        env[node] = copied_node(graph, node, env.__getitem__)
    return None


def copied(graph: Graph) -> Graph:
    """A graph of its own, records included."""
    copy = Graph()
    copy.output(copy_into(copy, graph, {}))
    return copy


def entering(graph: Graph, like: Node) -> Node:
    """A placeholder for the value of a node of another graph."""
    node = graph.placeholder(like.name)
    node.meta = dict(like.meta)
    return node


def called(graph: Graph, target: Function, args: tuple[Argument, ...], kwargs: Mapping[str, Argument]) -> Node:
    """A call where the graph inserts: what torch's own `call_function` gives, without looking for sizes, as above."""
    made = graph.call_function(target)
    _put(made, "args", args)
    if kwargs:
        _put(made, "kwargs", kwargs)
    return made


def call(graph: Graph, record: Record | tuple[Record, ...], target: Function, *args: Argument, **kwargs: Argument) -> Node:
    """A call with its record, where the graph inserts."""
    node = called(graph, target, args, kwargs)
    set_record(node, record)
    return node
