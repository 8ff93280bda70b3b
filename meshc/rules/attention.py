"""Sharding rules of `meshc::attention` and its blocks: batch, heads and queries split; keys whole, in a ring, or left on their ranks.

Under a causal mask a rank's queries must be a range, whose start is an argument of the operator. Dropout is drawn by a weight's global
position: the call holds the rank's tile of [batch, heads, q, k]. Where `propagate` has split the keys too, along the axis that splits the
queries, blocks of keys pass round a ring (`ring.py`). Calls on a block of keys, and `attention_zigzag`, are never in a model; their rules
relate the shardings of their operands and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ops import attention as _attention_operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.ring import Ring, attention_flops, attention_gradient_flops, draws_of, mask_of
from meshc.rules.rule import ONE, Local, Made, RingLetter, Rule, by_text, einsum, shape_of
from meshc.rules.split_keys import SplitKeys
from meshc.rules.zigzag import Zigzag

meshc = torch.ops.meshc

Q, K, BIAS, ROW = "b h q d!", "b h k! d!", "b h q k!", "b h q"
OPERANDS = {"grad": Q, "q": Q, "k": K, "v": K, "bias": BIAS, "out": Q, "lse": ROW, "seed_step": "seed!"}
ZIGZAG = {"q", "k"}
ROLES = {"h": "heads", "d": "head", "q": "queries"}


def _attention(node: Node, tensors: list[Node]) -> Rule:
    return _rule(node, tensors, [Q, ROW], (1, 2), ())


def _attention_backward(node: Node, tensors: list[Node]) -> Rule:
    results = [Q, f"{K} +q", f"{K} +q"]
    if node.target is meshc.attention_bias_backward.default:
        results.append(_bias_gradient_text(shape_of(tensors[4]), shape_of(tensors[1])))
    return _rule(node, tensors, results, (2, 3), (1, 2))


def _bias_gradient_text(shape: Sequence[int], queries: Sequence[int]) -> str:
    """The text of a bias's gradient, which is summed over the dims along which the bias broadcasts."""
    same = [letter for letter, size, all_of_them in zip("bhq", shape, queries, strict=False) if size == 1 != all_of_them]
    return " ".join([*(ONE if token in same else token for token in BIAS.split()), *(f"+{letter}" for letter in same)])


def _rule(node: Node, tensors: list[Node], results: list[str], keys: tuple[int, ...], gradients: tuple[int, ...]) -> Rule:
    named = named_arguments(node)
    operands = [OPERANDS[name] for name, given in named.items() if name in OPERANDS and given is not None]
    text = f"{', '.join(operands)} -> {' | '.join(results)}"
    if named["real"] is not None:
        return einsum(_block_text(text), node, tensors)
    major = {"q"} if named["causal"] else set[str]()
    by_kernels = named["seed_step"] is None and len(results) < 4
    ring = RingLetter("k", keys, gradients, zigzag=by_kernels, apart=by_kernels)
    return einsum(text, node, tensors, lower=_lower, major=major, roles=ROLES, rings={"q": ring})


def _block_text(text: str) -> str:
    """The rule's text for a block of the keys: the call holds the start of the rank's own queries, which are split no further, so that no
    gradient is partial."""
    return " ".join({"q": "q!", "q,": "q!,", "+q": ""}.get(letter, letter) for letter in text.split())


def shape_of_mask(node: Node) -> tuple[bool, int, int]:
    """(causal, window, offset) of a call."""
    causal, _, window, offset = mask_of(node)
    return causal, window, offset


def _lower(local: Local) -> Made:
    """A ring, or the same call on local operands; under a causal mask it gets the start of the tile of queries."""
    node = local.node
    if local.axes("k"):
        ring = (Zigzag if local.uses_zigzag else Ring if local.axes("q") == local.axes("k") else SplitKeys)(local)
        return ring.forward() if node.target is meshc.attention.default else ring.backward()
    numbers: dict[str, object] = {**draws_of(local, 0)}
    if local.axes("q") and mask_of(node)[0]:
        numbers["start"] = local.start("q")
    return local.call(*local.operands, **numbers)


_ZIGZAG: Final = by_text(f"b h q! d!, {K}, {K} -> b h q! d! | b h q!", zigzag=ZIGZAG)
_ZIGZAG_BACKWARD: Final = by_text(
    f"b h q! d!, b h q! d!, {K}, {K}, b h q! d!, b h q! -> b h q! d! | {K} | {K}", zigzag=ZIGZAG
)

OPERATORS = declarations({
    "meshc.attention": Operator(_attention, flops=attention_flops, arithmetic="attention"),
    "meshc.attention_backward meshc.attention_bias_backward": Operator(
        _attention_backward, flops=attention_gradient_flops, arithmetic="attention"
    ),
    "meshc.attention_merge": Operator(by_text("b h q d, b h q, b h q d, b h q -> b h q d | b h q")),
    "meshc.attention_join": Operator(by_text("n! b h q d! -> b h q e! | b h q")),
    "meshc.attention_zigzag": Operator(_ZIGZAG, flops=attention_flops, arithmetic="attention"),
    "meshc.attention_zigzag_backward": Operator(_ZIGZAG_BACKWARD, flops=attention_gradient_flops, arithmetic="attention"),
})
