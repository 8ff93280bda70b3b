"""`meshc::attention`: batch and heads pass, each query stands alone, all keys must be there.

A causal mask without a bias ties query positions to key positions, so there the queries must be whole as well.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ops import attention as _attention_operators  # noqa: F401 - registers them
from meshc.passes.rules.rule import Rule, RuleFunction, einsum

meshc = torch.ops.meshc


def _letters(node: Node, causal: bool) -> tuple[str, str, str]:
    q = "q!" if causal else "q"
    return f"b h {q} d!", "b h k! d!", f"b h {q} k!"


def _attention(node: Node, tensors: list[Node]) -> Rule:
    q, k, bias = _letters(node, bool(node.args[4]))
    operands = [q, k, k] + [bias] * (len(tensors) - 3)
    row = " ".join(q.split()[:3])
    return einsum(f"{', '.join(operands)} -> {q} | {row}", node, tensors)


def _attention_backward(node: Node, tensors: list[Node]) -> Rule:
    q, k, bias = _letters(node, bool(node.args[7]))
    row = " ".join(q.split()[:3])
    operands = [q, q, k, k] + [bias] * (len(tensors) - 6) + [q, row]
    return einsum(f"{', '.join(operands)} -> {q} | {k} +q | {k} +q", node, tensors, self_masked=False)


RULES: dict[object, RuleFunction] = {
    meshc.attention.default: _attention,
    meshc.attention_backward.default: _attention_backward,
}
