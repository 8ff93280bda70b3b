"""Overlap of exchanges with computation: exchanges of computed values move up, independent products move behind them.

    r = mm(x, router)   c = f(r)   gc = all_gather(c)   y = g(gc)   gx = all_gather(x)   z = h(y, gx)
  becomes
    gx = all_gather(x)   r = mm(x, router)   c = f(r)   gc = all_gather(c)   y = g(gc)   z = h(y, gx)

    dw = mm(dy, x)   dx = mm(dy, w)   s = reduce_scatter(dx)   z = f(s)
  becomes
    dx = mm(dy, w)   s = reduce_scatter(dx)   dw = mm(dy, x)   z = f(s)

Partition emits an exchange where its result is first read, and autograd the gradient of a weight before that of the input: a rank would
wait for the link, and for the other ranks. An exchange, with the nodes computed for it alone, moves up to its operands, past a few products
at most, since its result is in memory from there on. The gradient of a weight moves down behind one exchange: operands of both products are
in memory until then, so not under a memory budget. Views of a small exchange that only the stage's results read, such as metrics, move to
the end of their phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.cost.flops import flops
from meshc.ir import has_record, is_integer, local_bytes, record, records, spmd
from meshc.ir.graph import ancestors_of
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.bucket import SMALL
from meshc.program.packing import below_views, is_view
from meshc.program.preparation import from_placeholder

PASSED: Final = 2
"""Products that an exchange is moved past, at most."""
ALONE: Final = 8
"""Nodes computed for an exchange alone that move up with it, at most."""


def overlap_exchanges(lowered: LoweredProgram) -> LoweredProgram:
    """Reorders each stage; values do not change."""
    for stage in lowered.stages.values():
        overlap_graph(stage.graph, sink=lowered.request.options.budget is None)
    return lowered


def overlap_graph(graph: Graph, sink: bool = True) -> None:
    """Reorders a graph in place. `sink`: gradients of weights may be computed later, which keeps their operands for longer."""
    exchanges = [node for node in graph.nodes if _is_exchange(node)]
    for exchange in exchanges:
        apart = _result_views(exchange)
        if apart is None:
            _move_up(exchange)
        elif local_bytes(record(exchange)) <= SMALL:
            _delay_results(exchange, apart)
    covered: set[Node] = set()
    for exchange in exchanges if sink else ():
        if _result_views(exchange) is None:
            _move_product_behind(exchange, covered)
    graph.lint()


def _is_exchange(node: Node) -> bool:
    """Whether a node is a collective of computed values: not of stored or updated ones, nor over microbatches or between stages."""
    if node.op != "call_function" or not spmd.is_collective(node.target) or node.args[1] == ["mb"] or spmd.joins_stages(node):
        return False
    return record(node).phase != "update" and not from_placeholder(node)


def _move_up(exchange: Node) -> None:
    """Moves an exchange, with the nodes computed for it alone, right behind the last of their operands."""
    own = _made_for(exchange)
    behind = _last_read(own)
    if behind is None or behind.op == "placeholder" or _phase(behind) != _phase(exchange) or _is_on_its_way(behind):
        return
    passed = [node for node in _between(behind, exchange) if node not in own]
    if not passed or sum(_is_product(node) for node in passed) > PASSED:
        return
    for node in own:
        behind.append(node)
        behind = node


def _made_for(exchange: Node) -> list[Node]:
    """The exchange and operands that nothing else reads, back to a product or another collective, ALONE nodes at most; in order."""
    own = {exchange: None}
    work = [exchange]
    while work and len(own) <= ALONE:
        for operand in work.pop().all_input_nodes:
            alone = operand.op == "call_function" and set(operand.users) <= own.keys() and not is_integer(operand)
            if alone and not _is_product(operand) and not spmd.is_collective(operand.target) and _phase(operand) == _phase(exchange):
                own[operand] = None
                work.append(operand)
    return sorted(own)


def _last_read(own: list[Node]) -> Node | None:
    """The last operand of these nodes that is not among them."""
    inside = set(own)
    return max((operand for node in own for operand in node.all_input_nodes if operand not in inside), default=None)


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _is_on_its_way(value: Node) -> bool:
    """Whether a value is, up to views, the result of a collective or a host copy, so that its readers wait."""
    value = below_views(value)
    return value.op == "call_function" and (spmd.is_collective(value.target) or spmd.is_host_copy(value.target))


def _result_views(exchange: Node) -> list[Node] | None:
    """Views and clones of an exchange if only the stage's results read it; else None."""
    apart = list(exchange.users)
    for node in apart:
        if node.op == "output":
            continue
        if not (is_view(node) or node.target is torch.ops.aten.clone.default) or _phase(node) != _phase(exchange):
            return None
        apart += [user for user in node.users if user not in apart]
    return sorted(node for node in apart if node.op != "output")


def _delay_results(exchange: Node, apart: list[Node]) -> None:
    """Moves the views of an exchange to the end of its phase: the wait is there."""
    last = exchange
    while last.next.op == "call_function" and _phase(last.next) in (_phase(exchange), ""):
        last = last.next
    for node in apart:
        if node is not last:
            last.append(node)
            last = node


def _move_product_behind(exchange: Node, covered: set[Node]) -> None:
    """Moves the gradient of a weight behind an exchange, if less computation stands between the exchange and its reader."""
    if _phase(exchange) != "backward":
        return
    found = _independent_product(exchange, covered)
    reader = min(exchange.users)
    if found is None or sum(flops(node) for node in _between(exchange, reader) if has_record(node)) >= flops(found):
        return
    moving = [found]
    for node in moving:
        moving += [user for user in node.users if user < exchange and user not in moving]
    if all(node is found or is_view(node) for node in moving):
        covered.add(found)
        for node in reversed(sorted(moving)):
            exchange.append(node)


def _independent_product(exchange: Node, covered: set[Node]) -> Node | None:
    """The product before the last one that the exchange depends on, if both share an operand and it may run later; else None."""
    makes = ancestors_of([exchange], through=lambda node: node is exchange or not spmd.is_collective(node.target))
    last: Node | None = None
    node = exchange.prev
    while node.op == "call_function":
        if _is_product(node) and node not in covered:
            if last is None and node not in makes:
                return None
            if last is not None:
                return (
                    None
                    if node in makes or _phase(node) != "backward" or _product_operands(node).isdisjoint(_product_operands(last))
                    else node
                )
            last = node
        node = node.prev
    return None


def _product_operands(product: Node) -> set[Node]:
    """Operands of a product, below all views."""
    return set(map(below_views, product.all_input_nodes))


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and has_record(node) and flops(node) > 0


def _phase(node: Node) -> str:
    return records(node)[0].phase if has_record(node) and records(node) else ""
