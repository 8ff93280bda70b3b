"""Sharding rules of `meshc::attention` and its blocks: batch, heads and queries split; keys whole, in a ring, or left on their ranks.

Under a causal mask a rank's queries must be a range, whose start is an argument of the operator. Where `propagate` has split the keys too,
along the axis that splits the queries, blocks of keys pass round a ring (`ring.py`). The operators of blocks are never in a model; their
rules relate the shardings of their operands and results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments, place_of
from meshc.ops import attention as _attention_operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.ring import Ring, attention_flops, attention_gradient_flops, mask_of
from meshc.rules.rule import Made, RingLetter, Rule, einsum
from meshc.rules.split_keys import SplitKeys
from meshc.rules.zigzag import Zigzag

if TYPE_CHECKING:
    from meshc.rules.local import Local

meshc = torch.ops.meshc

Q, K, BIAS, ROW = "b h q d!", "b h k! d!", "b h q k!", "b h q"
ZIGZAG = frozenset("qk")
ROLES = {"h": "heads", "d": "head", "q": "queries"}


def _attention(node: Node, tensors: list[Node]) -> Rule:
    operands = [Q, K, K] + [BIAS] * (len(tensors) - 3)
    return _rule(node, tensors, f"{', '.join(operands)} -> {Q} | {ROW}", RingLetter("k", (1, 2), zigzag=True, apart=True))


def _attention_backward(node: Node, tensors: list[Node]) -> Rule:
    operands = [Q, Q, K, K] + [BIAS] * (len(tensors) - 6) + [Q, ROW]
    return _rule(node, tensors, f"{', '.join(operands)} -> {Q} | {K} +q | {K} +q", RingLetter("k", (2, 3), (1, 2), zigzag=True, apart=True))


def _rule(node: Node, tensors: list[Node], text: str, keys: RingLetter) -> Rule:
    if named_arguments(node)["real"] is not None:
        return einsum(_block_text(text), node, tensors)
    major = frozenset("q") if mask_of(node)[0] else frozenset[str]()
    return einsum(text, node, tensors, lower=_lower, major=major, roles=ROLES, rings={"q": keys})


def shape_of_mask(node: Node) -> tuple[bool, int, int]:
    """(causal, window, offset) of a call."""
    causal, _, window, offset = mask_of(node)
    return causal, window, offset


def _lower(local: Local) -> Made:
    """A ring, or the same call on local operands; under a causal mask it gets the start of the tile of queries."""
    node = local.node
    causal = place_of(node, "causal")
    if local.axes("k"):
        ring = (Zigzag if local.uses_zigzag else Ring if local.axes("q") == local.axes("k") else SplitKeys)(local)
        return ring.forward() if node.target is meshc.attention.default else ring.backward()
    if not local.axes("q") or not node.args[causal]:
        return local.call(*local.operands)
    start = local.start("q")
    made = local.call(*local.operands)
    end = causal + 2
    window, offset = (*made.args[end:], 0, 0)[:2]
    made.args = (*made.args[:end], window, offset, start)
    return made


def _block_text(text: str) -> str:
    """The rule's text for a block of the keys: the call holds the start of the rank's own queries, which are split no further, so that no
    gradient is partial."""
    return " ".join({"q": "q!", "q,": "q!,", "+q": ""}.get(letter, letter) for letter in text.split())


def _zigzag(node: Node, tensors: list[Node]) -> Rule:
    return einsum(f"b h q! d!, {K}, {K} -> b h q! d! | b h q!", node, tensors, zigzag=ZIGZAG)


def _zigzag_backward(node: Node, tensors: list[Node]) -> Rule:
    return einsum(f"b h q! d!, b h q! d!, {K}, {K}, b h q! d!, b h q! -> b h q! d! | {K} | {K}", node, tensors, zigzag=ZIGZAG)


def _merge(node: Node, tensors: list[Node]) -> Rule:
    return einsum("b h q d, b h q, b h q d, b h q -> b h q d | b h q", node, tensors)


def _join(node: Node, tensors: list[Node]) -> Rule:
    return einsum("n! b h q d! -> b h q e! | b h q", node, tensors)


OPERATORS = declarations({
    "meshc.attention": Operator(_attention, flops=attention_flops, arithmetic="attention"),
    "meshc.attention_backward": Operator(_attention_backward, flops=attention_gradient_flops, arithmetic="attention"),
    "meshc.attention_merge": Operator(_merge),
    "meshc.attention_join": Operator(_join),
    "meshc.attention_zigzag": Operator(_zigzag, flops=attention_flops, arithmetic="attention"),
    "meshc.attention_zigzag_backward": Operator(_zigzag_backward, flops=attention_gradient_flops, arithmetic="attention"),
})
