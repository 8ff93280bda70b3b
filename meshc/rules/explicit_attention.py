"""Sharding rules of `meshc::explicit_attention` (dropped weights, or a bias with a gradient), with keys whole or in a ring.

Batch, heads and queries may be split; each query needs all keys, at once or block by block. Dropout is drawn by a weight's global position:
the call holds the rank's tile of [batch, heads, q, k], and for a block in a ring the tile of that block.

    dbias  [.., q of the rank, all keys]        backward's blocks give the columns of rank r, r - 1, ..., round the ring; tile j comes
                                                with block r - j, so the tiles are reordered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ir import spmd
from meshc.ir.schemas import place_of
from meshc.ops import explicit_attention as _operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.ring import Ring, attention_flops, attention_gradient_flops, mask_of
from meshc.rules.rule import ONE, Made, RingLetter, Rule, einsum, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten, meshc = torch.ops.aten, torch.ops.meshc

Q, K, BIAS, ROW, SEED = "b h q d!", "b h k! d!", "b h q k!", "b h q", "seed!"
WEIGHTS = "b h q k".split()
ROLES = {"h": "heads", "d": "head", "q": "queries"}


def _optional(node: Node) -> tuple[list[str], list[str]]:
    """The rule's texts of a bias and of a seed; empty where the call has none."""
    given = [node.args[place_of(node, name)] is not None for name in ("bias", "seed_step")]
    return [BIAS] * given[0], [SEED] * given[1]


def _forward(node: Node, tensors: list[Node]) -> Rule:
    bias, seed = _optional(node)
    return _rule(node, tensors, [Q, K, K, *bias, *seed], [Q, ROW], RingLetter("k", (1, 2)))


def _backward(node: Node, tensors: list[Node]) -> Rule:
    bias, seed = _optional(node)
    results = [Q, f"{K} +q", f"{K} +q"]
    if node.target is meshc.explicit_attention_bias_backward.default:
        results.append(_bias_gradient_text(shape_of(tensors[4]), shape_of(tensors[1])))
    return _rule(node, tensors, [Q, Q, K, K, *bias, Q, ROW, *seed], results, RingLetter("k", (2, 3), (1, 2)))


def _bias_gradient_text(shape: Sequence[int], queries: Sequence[int]) -> str:
    """The text of a bias's gradient, which is summed over the dims along which the bias broadcasts."""
    same = [letter for letter, size, all_of_them in zip("bhq", shape, queries, strict=False) if size == 1 != all_of_them]
    return " ".join([*(ONE if token in same else token for token in BIAS.split()), *(f"+{letter}" for letter in same)])


def _rule(node: Node, tensors: list[Node], operands: list[str], results: list[str], keys: RingLetter) -> Rule:
    text = f"{', '.join(operands)} -> {' | '.join(results)}"
    if len(node.args) > place_of(node, "first"):
        return einsum(_block_text(text), node, tensors)
    major = frozenset("q") if mask_of(node)[0] else frozenset[str]()
    return einsum(text, node, tensors, lower=_lower, major=major, roles=ROLES, rings={"q": keys})


def _block_text(text: str) -> str:
    """The rule's text for a block of the keys: queries are the rank's own, so they are whole and no gradient is partial."""
    return " ".join({"q": "q!", "q,": "q!,", "+q": ""}.get(letter, letter) for letter in text.split())


def _lower(local: Local) -> Made:
    forward = local.node.target is meshc.explicit_attention.default
    if local.axes("k"):
        ring = ExplicitRing(local)
        return ring.forward() if forward else ring.backward()
    given = iter(local.operands)
    tensors = local.node.args[: place_of(local.node, "call")]
    return local.emit(local.node.target, *(None if one is None else next(given) for one in tensors), *_call_numbers(local, 0))


def _call_numbers(local: Local, back: int) -> tuple[object, ...]:
    """The arguments from `call` to the start of the queries; where keys are split, for those of the rank `back` places before this one."""
    node = local.node
    call, how = place_of(node, "call"), mask_of(node)
    draws = local.weights_drawn(WEIGHTS, {"k": back}) if node.args[place_of(node, "seed_step")] is not None else ([], [], [])
    return *node.args[call : call + 2], *draws, *how, local.start("q") if how[0] else 0


class ExplicitRing(Ring):
    """A `meshc::explicit_attention` whose queries and keys are both split by one axis."""

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        drops = local.node.args[place_of(local.node, "seed_step")] is not None
        self.seed = local.operands[-1] if drops else None
        self.of_bias: list[Node] = []

    def attend_block(self, q: Node, keys: Node, values: Node, bias: Node | None, step: int) -> Node:
        return self.local.emit(meshc.explicit_attention.default, q, keys, values, bias, self.seed, *self.block_arguments(step))

    def block_arguments(self, step: int) -> tuple[object, ...]:
        """The numbers of a block's call, with the block's tile for dropout."""
        return *_call_numbers(self.local, step), self.local.start("k", step), self.local.count("k", step)

    def gradients(self, q: Node, keys: Node, values: Node, bias: Node | None, known: Sequence[Node], step: int) -> list[Node]:
        grad, out, lse = known
        target = self.local.node.target
        made = self.local.emit(target, grad, q, keys, values, bias, out, lse, self.seed, *self.block_arguments(step))
        if target is meshc.explicit_attention_bias_backward.default:
            self.of_bias.append(self.local.item(made, 3))
        return [self.local.item(made, index) for index in range(3)]

    def backward(self) -> list[Node]:
        found = super().backward()
        return [*found, self.bias_gradient()] if self.of_bias else found

    def bias_gradient(self) -> Node:
        """The bias's gradient, put together from the columns of each block's keys."""
        emit, shape = self.local.emit, self.local.shape
        if shape(self.of_bias[0])[3] == 1:
            total, *rest = self.of_bias
            for one in rest:
                total = emit(aten.add.Tensor, total, one)
            return total
        beside = emit(aten.cat.default, self.of_bias, 3)
        tiles = [emit(spmd.shard, beside, 3, self.ranks, self.local.place(self.axes[0], tile)) for tile in range(self.ranks)]
        found, length = emit(aten.cat.default, tiles, 3), self.local.global_size("k")
        return found if length == self.local.local_size("k") * self.ranks else emit(aten.slice.Tensor, found, 3, 0, length)


OPERATORS = declarations({
    "meshc.explicit_attention": Operator(_forward, flops=attention_flops, arithmetic="attention"),
    "meshc.explicit_attention_backward meshc.explicit_attention_bias_backward": Operator(
        _backward, flops=attention_gradient_flops, arithmetic="attention"
    ),
})
