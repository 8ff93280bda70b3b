"""Overlap of exchanges with computation: exchanges of computed values move up, independent products move behind them.

    r = mm(x, router)   c = f(r)   gc = all_gather(c)   y = g(gc)   gx = all_gather(x)   z = h(y, gx)
  becomes
    gx = all_gather(x)   r = mm(x, router)   c = f(r)   gc = all_gather(c)   y = g(gc)   z = h(y, gx)

    dw = mm(dy, x)   dx = mm(dy, w)   s = reduce_scatter(dx)   z = f(s)
  becomes
    dx = mm(dy, w)   s = reduce_scatter(dx)   dw = mm(dy, x)   z = f(s)

Partition writes an exchange where its result is first read, and autograd the gradient of a matrix before that of what it was multiplied
with: a rank would wait for the link, and for the other ranks. An exchange, with what is made for it alone, goes up to where its operands
are, past a few products at most, since its result is in memory from there on. The gradient of a matrix goes down behind one exchange:
operands of both products are in memory until then, so not where a budget is to be kept. What takes a small exchange apart for the
stage's results alone, such as metrics, waits until the end of its phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch.fx import Graph, Node

from meshc.cost.flops import flops
from meshc.ir import has_record, is_integer, local_bytes, record, records, spmd
from meshc.ir.graph import made_of
from meshc.passes.phases.lowered import Lowered
from meshc.program.bucket import SMALL
from meshc.program.packing import is_view
from meshc.program.preparation import from_placeholder

PASSED: Final = 2
"""Products that an exchange goes up past, at most."""
ALONE: Final = 8
"""Nodes that are made for an exchange alone and go up with it, at most."""


def overlap_exchanges(lowered: Lowered) -> Lowered:
    """Reorders each stage; values do not change."""
    for stage in lowered.stages.values():
        overlapped(stage.graph, sink=lowered.request.memory_budget is None)
    return lowered


def overlapped(graph: Graph, sink: bool = True) -> None:
    """A graph in place. `sink`: gradients of matrices may be made later, which holds what they are made of for longer."""
    exchanges = [node for node in graph.nodes if _is_exchange(node)]
    for exchange in exchanges:
        apart = _for_results(exchange)
        if apart is None:
            _raise(exchange)
        elif local_bytes(record(exchange)) <= SMALL:
            _put_off(exchange, apart)
    covered: set[Node] = set()
    for exchange in exchanges if sink else ():
        if _for_results(exchange) is None:
            _cover(exchange, covered)
    graph.lint()


def _is_exchange(node: Node) -> bool:
    """Of what is computed, between ranks: not of what is stored or updated, nor between microbatches or stages."""
    if node.op != "call_function" or not spmd.is_collective(node.target) or node.args[1] == ["mb"] or spmd.joins_stages(node):
        return False
    return record(node).phase != "update" and not from_placeholder(node)


def _raise(exchange: Node) -> None:
    """To where the last of its operands is, with what is made for it alone."""
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
    """The exchange and what nothing else reads, back to a product, another exchange, or what is large beside it; in order."""
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
    """What these nodes read that stands last."""
    inside = set(own)
    return max((operand for node in own for operand in node.all_input_nodes if operand not in inside), default=None)


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _is_on_its_way(value: Node) -> bool:
    """Whether what reads a value waits for a collective, which something else may be made to hide."""
    while is_view(value) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value.op == "call_function" and (spmd.is_collective(value.target) or spmd.is_host_copy(value.target))


def _for_results(exchange: Node) -> list[Node] | None:
    """What takes an exchange apart, where nobody but the stage's results reads it; else None."""
    apart = list(exchange.users)
    for node in apart:
        if node.op == "output":
            continue
        if not (is_view(node) or node.target is torch.ops.aten.clone.default) or _phase(node) != _phase(exchange):
            return None
        apart += [user for user in node.users if user not in apart]
    return sorted(node for node in apart if node.op != "output")


def _put_off(exchange: Node, apart: list[Node]) -> None:
    """What takes an exchange apart goes to the end of its phase: it is waited for there."""
    last = exchange
    while last.next.op == "call_function" and _phase(last.next) in (_phase(exchange), ""):
        last = last.next
    for node in apart:
        if node is not last:
            last.append(node)
            last = node


def _cover(exchange: Node, covered: set[Node]) -> None:
    """Puts the gradient of a matrix behind an exchange, if there is less to do until that is read."""
    if _phase(exchange) != "backward":
        return
    found = _beside(exchange, covered)
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


def _beside(exchange: Node, covered: set[Node]) -> Node | None:
    """The product in front of the last one that an exchange is made of, if the two have an operand in common and it may wait."""
    makes = made_of([exchange], through=lambda node: node is exchange or not spmd.is_collective(node.target))
    last: Node | None = None
    node = exchange.prev
    while node.op == "call_function":
        if _is_product(node) and node not in covered:
            if last is None and node not in makes:
                return None
            if last is not None:
                return None if node in makes or _phase(node) != "backward" or _read(node).isdisjoint(_read(last)) else node
            last = node
        node = node.prev
    return None


def _read(product: Node) -> set[Node]:
    """What a product reads, however it looks at it."""
    found = set()
    for operand in product.all_input_nodes:
        while is_view(operand) and operand.all_input_nodes:
            operand = operand.all_input_nodes[0]
        found.add(operand)
    return found


def _is_product(node: Node) -> bool:
    return node.op == "call_function" and has_record(node) and flops(node) > 0


def _phase(node: Node) -> str:
    return records(node)[0].phase if has_record(node) and records(node) else ""
