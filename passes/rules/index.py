"""Indexing by data: embeddings and `take`. The indexed letter is split by global position: indices outside a rank's tile give zero."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ops.take import take_backward
from meshc.passes.rules.rule import Rule, RuleFunction, einsum, shape_of

aten = torch.ops.aten
meshc = torch.ops.meshc


def _index_letters(node: Node) -> list[str]:
    return [f"i{k}" for k in range(len(shape_of(node)))]


def _embedding(node: Node, tensors: list[Node]) -> Rule:
    index = " ".join(_index_letters(tensors[1]))
    return einsum(f"v d, {index} -> {index} d +v", node, tensors, lower=_lower_embedding, self_masked=True, clean=(1,))


def _inside(local, index, letter: str):  # type: ignore[no-untyped-def]
    """(index inside the tile or 0, mask of those inside)."""
    shifted = local.emit(aten.sub.Tensor, index, local.start(letter))
    low = local.emit(aten.ge.Scalar, shifted, 0)
    high = local.emit(aten.lt.Scalar, shifted, local.local_size(letter))
    inside = local.emit(aten.logical_and.default, low, high)
    return local.emit(aten.mul.Tensor, shifted, inside), inside


def _lower_embedding(local) -> object:  # type: ignore[no-untyped-def]
    weight, index = local.operands
    if not local.axes("v"):
        return local.emit(aten.embedding.default, weight, index)
    safe, inside = _inside(local, index, "v")
    rows = local.emit(aten.embedding.default, weight, safe)
    return local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, inside, -1), rows, 0.0)


def _embedding_backward(node: Node, tensors: list[Node]) -> Rule:
    letters = _index_letters(tensors[1])
    index = " ".join(letters)
    reduced = " ".join(f"+{letter}" for letter in letters)
    return einsum(f"{index} d, {index} -> v d {reduced}", node, tensors, lower=_lower_embedding_backward)


def _lower_embedding_backward(local) -> object:  # type: ignore[no-untyped-def]
    grad, index = local.operands
    rows, padding, scale = local.node.args[2], local.node.args[3], local.node.args[4]
    if not local.axes("v"):
        return local.emit(aten.embedding_dense_backward.default, grad, index, rows, padding, scale)
    if padding >= 0:
        keep = local.emit(aten.ne.Scalar, index, padding)
        grad = local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, keep, -1), grad, 0.0)
    safe, inside = _inside(local, index, "v")
    grad = local.emit(aten.where.ScalarOther, local.emit(aten.unsqueeze.default, inside, -1), grad, 0.0)
    return local.emit(aten.embedding_dense_backward.default, grad, safe, local.local_size("v"), -1, scale)


def _take(node: Node, tensors: list[Node]) -> Rule:
    rows = " ".join(_index_letters(tensors[1]))
    return einsum(f"{rows} v, {rows} -> {rows} +v", node, tensors, lower=_lower_take, self_masked=True)


def _lower_take(local) -> object:  # type: ignore[no-untyped-def]
    x, index = local.operands
    return local.emit(meshc.take.default, x, index, local.node.args[2], local.start("v"))


def _take_backward(node: Node, tensors: list[Node]) -> Rule:
    rows = " ".join(_index_letters(tensors[1]))
    return einsum(f"{rows}, {rows} -> {rows} v", node, tensors, lower=_lower_take_backward)


def _lower_take_backward(local) -> object:  # type: ignore[no-untyped-def]
    grad, index = local.operands
    return local.emit(meshc.take_backward.default, grad, index, local.node.args[2], local.local_size("v"), local.start("v"))


RULES: dict[object, RuleFunction] = {
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    meshc.take.default: _take,
    meshc.take_backward.default: _take_backward,
}
__all__ = ["RULES", "take_backward"]
