"""`meshc::attention`: batch and heads pass, each query stands alone, all keys must be there.

Under a causal mask a rank's queries must be a range, of which the operator is told the beginning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ops import attention as _attention_operators  # noqa: F401 - registers them
from meshc.passes.rules.rule import Rule, RuleFunction, einsum

if TYPE_CHECKING:
    from meshc.passes.rules.local import Local

meshc = torch.ops.meshc

CAUSAL: dict[object, int] = {meshc.attention.default: 4, meshc.attention_backward.default: 7}
"""The position of `causal` among the arguments; after it come scale, window, offset, start."""
Q, K, BIAS, ROW = "b h q d!", "b h k! d!", "b h q k!", "b h q"
ROLES = {"h": "heads", "d": "head", "q": "queries"}


def _attention(node: Node, tensors: list[Node]) -> Rule:
    operands = [Q, K, K] + [BIAS] * (len(tensors) - 3)
    return _rule(node, tensors, f"{', '.join(operands)} -> {Q} | {ROW}")


def _attention_backward(node: Node, tensors: list[Node]) -> Rule:
    operands = [Q, Q, K, K] + [BIAS] * (len(tensors) - 6) + [Q, ROW]
    return _rule(node, tensors, f"{', '.join(operands)} -> {Q} | {K} +q | {K} +q")


def _rule(node: Node, tensors: list[Node], text: str) -> Rule:
    if not node.args[CAUSAL[node.target]]:
        return einsum(text, node, tensors, roles=ROLES)
    return einsum(text, node, tensors, lower=_lower_causal, major=frozenset("q"), roles=ROLES)


def _lower_causal(local: Local) -> Node:
    """The same call on local operands, which begins where the tile does."""
    if not local.axes("q"):
        return local.call(*local.operands)
    start = local.start("q")
    made = local.call(*local.operands)
    end = CAUSAL[local.node.target] + 2
    window, offset = (*made.args[end:], 0, 0)[:2]
    made.args = (*made.args[:end], window, offset, start)
    return made


RULES: dict[object, RuleFunction] = {
    meshc.attention.default: _attention,
    meshc.attention_backward.default: _attention_backward,
}
