"""Chunked head of a training step: operators from the last forward matrix product to the gradients of that product, and the chunk count.

    h -> logits = mm(h, w) -> cast -> log_softmax -> take -> sum -> loss                      forward, from the product on
    gh, gw <- mm, mm <- cast <- log_softmax_backward <- take_backward <- 1                    backward, up to the products of the gradient

`h` is [tokens.., hidden], the product [tokens.., vocab], more than it is made of. Only a step has such a head: in autograd the gradient of
the loss comes from outside, when forward is over.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from torch.fx import Graph, Node

from meshc.cost.flops import flops
from meshc.ir import calls_of, is_getitem, record, value_of
from meshc.ir.graph import ancestors_of, computable_from, descendants_of
from meshc.ir.keys import is_a
from meshc.ir.spmd import CHUNK
from meshc.passes.phases.chunked_head import ChunkedHead
from meshc.passes.phases.factors import Factors, Token, value_record
from meshc.passes.phases.placed_model import PlacedModel
from meshc.plan.plan_faults import refuse_faults

_FAULT: Final = (
    "forward makes no product of rows and a weight in such a module that is more than its rows and that the loss is made of without a "
    "further one; name the module of the head, with * for any text, or leave the line out"
)
_NO_STEP: Final = "only a TrainStep knows the gradient of its loss when it makes it; the head runs whole"


@dataclass(frozen=True)
class HeadProduct:
    """A product of rows and a weight: `tokens`, the factors that its result has of the rows, major to minor; `features`, of the weight."""

    node: Node
    tokens: tuple[int, ...]
    features: frozenset[int]


MOST: Final = 32
"""Chunks, where nobody says how many."""


def default_chunked_head(placed: PlacedModel, count: int) -> ChunkedHead | None:
    """What would run in so many chunks, where nobody has said whether it is to. None: there is no such head."""
    request = placed.request
    if not request.train or request.chunks is not None or placed.plan.chunks:
        return None
    return mark_chunked_head(placed.restart_for_request(replace(request, chunks=count))).chunked


def tall_operators(placed: PlacedModel, head: ChunkedHead) -> frozenset[Node]:
    """The operators of a head that make a value as tall as its product: of these there is a chunk at a time."""
    return frozenset(node for node in head.nodes if _is_tall(node, head, placed.factors))


def mark_chunked_head(placed: PlacedModel) -> PlacedModel:
    """With what runs in chunks, as the request has it or the last line of the plan about a head. Raises PlanError for lines about none."""
    request, lines = placed.request, placed.plan.chunks
    if request.chunks == 1 or (request.chunks is None and not lines):
        return placed
    if not request.train:
        return placed.with_notes(*(f"{line.where}: {_NO_STEP}" for line in lines))
    joint = placed.joint
    learned = computable_from(joint.graph, [node for key, node in joint.placeholders().items() if is_a(key, "parameter")])
    found = [one for node in _last_products(joint.graph) if (one := _product(node, placed.factors, learned)) is not None]
    modules = [record(one.node).source.module for one in found]
    refuse_faults("the plan does not fit this model", [f"{line.where}: {_FAULT}" for line in lines if not any(map(line.covers, modules))])
    counts = [request.chunks or next((line.count for line in reversed(lines) if line.covers(module)), 1) for module in modules]
    cut = [(head, count) for head, count in zip(found, counts, strict=True) if count > 1]
    if not cut:
        return placed
    head, count = max(cut, key=lambda pair: prod(record(pair[0].node).shape))
    forward = {*calls_of(joint.graph, "forward")}
    operators = forward & descendants_of([head.node], forward.__contains__) | _backward_operators(joint.graph, head, placed.factors)
    chunks = ChunkedHead(count, head.node, head.tokens, head.features, frozenset(operators))
    return replace(placed, chunked=chunks, sizes={**placed.sizes, CHUNK: count})


def _last_products(graph: Graph) -> list[Node]:
    """Products of forward of which no other product of forward is made."""
    before: set[Node] = set()
    last = []
    for node in reversed(calls_of(graph, "forward")):
        if not before.isdisjoint(node.users):
            before.add(node)
        elif flops(node) > 0:
            last.append(node)
            before.add(node)
    return last


def _product(node: Node, factors: Factors, learned: Collection[Node]) -> HeadProduct | None:
    """None: it is no product of rows and a weight that makes more than it is made of."""
    instance = factors.instances[node]
    made = {token: instance.factor[token] for dim in instance.results[0] for token in dim}
    weights: set[Token] = set()
    rows: set[Token] = set()
    read = 0
    for value, dims in zip(instance.values, instance.operands, strict=True):
        (weights if value[0] in learned else rows).update(token for dim in dims for token in dim if token in made)
        read += 0 if value[0] in learned else prod(value_record(value).shape)
    tokens = tuple(factor for token, factor in made.items() if token in rows - weights)
    features = frozenset(made[token] for token in weights - rows)
    return HeadProduct(node, tokens, features) if tokens and features and prod(record(node).shape) > read else None


def _backward_operators(graph: Graph, head: HeadProduct, factors: Factors) -> set[Node]:
    """What reads something as tall as the product before any other product of backward has run, and what that is made of there."""
    backward = dict.fromkeys(calls_of(graph, "backward"))
    behind: set[Node] = set()
    reads: list[Node] = []
    for node in backward:
        if any(operand in behind or (operand in backward and flops(operand) > 0) for operand in node.all_input_nodes):
            behind.add(node)
        elif any(_is_tall(operand, head, factors) for operand in node.all_input_nodes):
            reads.append(node)
    return backward.keys() & ancestors_of(reads, backward.__contains__)


def _is_tall(node: Node, head: HeadProduct | ChunkedHead, factors: Factors) -> bool:
    value = value_of(node) if is_getitem(node) else (node, 0)
    row = {factor for dim in factors.dims.get(value, ()) for factor in dim}
    return not row.isdisjoint(head.tokens) and not row.isdisjoint(head.features)
