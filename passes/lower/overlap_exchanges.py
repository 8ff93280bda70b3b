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
from meshc.ir import has_record, is_integer, local_bytes, phase_of, record, spmd
from meshc.ir.graph import ancestors_of, put_in_order
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
    if not spmd.is_collective(node.target) or node.args[1] == ["mb"] or spmd.joins_stages(node):
        return False
    return phase_of(node) != "update" and not from_placeholder(node)


def _move_up(exchange: Node) -> None:
    """Moves an exchange, with the nodes computed for it alone, right behind the last of their operands."""
    own = _made_for(exchange)
    behind = max((operand for node in own for operand in node.all_input_nodes if operand not in own), default=exchange)
    if phase_of(behind) != phase_of(exchange) or _is_on_its_way(behind):
        return
    passed = [node for node in _between(behind, exchange) if node not in own]
    if passed and sum(map(_is_product, passed)) <= PASSED:
        put_in_order([behind, *own])


def _made_for(exchange: Node) -> list[Node]:
    """The exchange and operands that nothing else reads, back to a product or another collective, ALONE nodes at most; in order."""
    own = {exchange: None}
    work = [exchange]
    while work and len(own) <= ALONE:
        for operand in work.pop().all_input_nodes:
            alone = set(operand.users) <= own.keys() and phase_of(operand) == phase_of(exchange) and not is_integer(operand)
            if alone and not _is_product(operand) and not spmd.is_collective(operand.target):
                own[operand] = None
                work.append(operand)
    return sorted(own)


def _between(first: Node, last: Node) -> Iterator[Node]:
    while (first := first.next) is not last:
        yield first


def _is_on_its_way(value: Node) -> bool:
    """Whether a value is, up to views, the result of a collective or a host copy, so that its readers wait."""
    target = below_views(value).target
    return spmd.is_collective(target) or spmd.is_host_copy(target)


def _result_views(exchange: Node) -> list[Node] | None:
    """Views and clones of an exchange if only the stage's results read it; else None."""
    apart = list(exchange.users)
    for node in apart:
        if node.op == "output":
            continue
        if not (is_view(node) or node.target is torch.ops.aten.clone.default) or phase_of(node) != phase_of(exchange):
            return None
        apart += [user for user in node.users if user not in apart]
    return sorted(node for node in apart if node.op != "output")


def _delay_results(exchange: Node, apart: list[Node]) -> None:
    """Moves the views of an exchange to the end of its phase: the wait is there."""
    last = exchange
    while last.next.op == "call_function" and phase_of(last.next) in (phase_of(exchange), ""):
        last = last.next
    put_in_order([last, *(apart[1:] if apart[:1] == [last] else apart)])


def _move_product_behind(exchange: Node, covered: set[Node]) -> None:
    """Moves the gradient of a weight behind an exchange, if less computation stands between the exchange and its reader."""
    found = _independent_product(exchange, covered) if phase_of(exchange) == "backward" else None
    if found is None or sum(flops(node) for node in _between(exchange, min(exchange.users)) if has_record(node)) >= flops(found):
        return
    moving = [found]
    for node in moving:
        moving += [user for user in node.users if user < exchange and user not in moving]
    if all(node is found or is_view(node) for node in moving):
        covered.add(found)
        put_in_order([exchange, *sorted(moving)])


def _independent_product(exchange: Node, covered: set[Node]) -> Node | None:
    """The product before the last one that the exchange depends on, if both share an operand and it may run later; else None."""
    makes = ancestors_of([exchange], through=lambda node: node is exchange or not spmd.is_collective(node.target))
    products: list[Node] = []
    node = exchange.prev
    while node.op == "call_function" and len(products) < 2:
        if _is_product(node) and node not in covered:
            products.append(node)
        node = node.prev
    if len(products) < 2 or products[0] not in makes or products[1] in makes or phase_of(products[1]) != "backward":
        return None
    last, found = (set(map(below_views, product.all_input_nodes)) for product in products)
    return None if found.isdisjoint(last) else products[1]


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and has_record(node) and flops(node) > 0


