"""Reductions: the letters of the dims that go are summed (or maximised, ...); a mean divides by the global size.

A split softmax needs two small reductions over its rows: the maximum and the sum.
"""

from __future__ import annotations

from math import prod

import torch
from torch.fx import Node

from meshc.passes.rules.rule import ONE, Rule, RuleFunction, result_shapes, shape_of

aten = torch.ops.aten


def _reduce(node: Node, tensors: list[Node], dims: object, keep: bool, how: str | None, **changes: object) -> Rule:
    (x,) = tensors
    shape = shape_of(x)
    letters = tuple(f"d{i}" for i in range(len(shape)))
    if dims is None or dims == []:
        gone = set(range(len(shape)))
    else:
        gone = {d % len(shape) for d in (dims if isinstance(dims, list | tuple) else [dims])} if shape else set()
    out = tuple(ONE if i in gone else letter for i, letter in enumerate(letters) if keep or i not in gone)
    reduced = {letters[i] for i in gone}
    count = len(result_shapes(node))
    if how is None:
        return Rule((letters,), (out,) * count, ({},) * count, whole=frozenset(reduced), **changes)  # type: ignore[arg-type]
    return Rule((letters,), (out,) * count, ({letter: how for letter in reduced},) * count, **changes)  # type: ignore[arg-type]


def _argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _sum(node: Node, tensors: list[Node]) -> Rule:
    dims = _argument(node, 1, "dim", None)
    return _reduce(node, tensors, dims, bool(_argument(node, 2, "keepdim", False)), "sum", kind="carry", linear="each")


def _sum_all(node: Node, tensors: list[Node]) -> Rule:
    return _reduce(node, tensors, None, False, "sum", kind="carry", linear="each")


def _mean(node: Node, tensors: list[Node]) -> Rule:
    dims = _argument(node, 1, "dim", None)
    return _reduce(node, tensors, dims, bool(_argument(node, 2, "keepdim", False)), "sum", linear="each", lower=_lower_mean)


def _mean_all(node: Node, tensors: list[Node]) -> Rule:
    return _reduce(node, tensors, None, False, "sum", linear="each", lower=_lower_mean)


def _lower_mean(local) -> object:  # type: ignore[no-untyped-def]
    (x,) = local.operands
    reduced = list(local.rule.sums[0])
    if not any(local.axes(letter) for letter in reduced):
        return local.emit(local.node.target, x, *local.node.args[1:], **local.node.kwargs)
    size = prod(local.global_size(letter) for letter in reduced)
    if local.node.target is aten.mean.default:
        total = local.emit(aten.sum.default, x, **local.node.kwargs)
    else:
        dims = local.node.args[1] if len(local.node.args) > 1 else local.node.kwargs.get("dim")
        keep = local.node.args[2] if len(local.node.args) > 2 else local.node.kwargs.get("keepdim", False)
        total = local.emit(aten.sum.dim_IntList, x, dims, keep)
    return local.emit(aten.mul.Tensor, total, 1.0 / size)


def _extreme(how: str) -> RuleFunction:
    neutral = float("-inf") if how == "max" else float("inf")

    def rule(node: Node, tensors: list[Node]) -> Rule:
        dims = _argument(node, 1, "dim", None)
        return _reduce(node, tensors, dims, bool(_argument(node, 2, "keepdim", False)), how, neutral=neutral)

    return rule


def _whole(node: Node, tensors: list[Node]) -> Rule:
    dims = _argument(node, 1, "dim", None)
    return _reduce(node, tensors, dims, bool(_argument(node, 2, "keepdim", False)), None)


def _softmax(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    dim = int(node.args[1]) % len(shape)  # type: ignore[call-overload]
    return Rule((letters,), (letters,), ({},), whole=frozenset({letters[dim]}))


def _softmax_backward(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    dim = int(node.args[2]) % len(shape)  # type: ignore[call-overload]
    return Rule((letters, letters), (letters,), ({},), whole=frozenset({letters[dim]}))


def _log_softmax(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    return Rule((letters,), (letters,), ({},), lower=_lower_log_softmax, self_masked=True)


def _lower_log_softmax(local) -> object:  # type: ignore[no-untyped-def]
    (x,) = local.operands
    dim = int(local.node.args[1]) % len(local.node.meta["meshc"].shape)
    letter = f"d{dim}"
    axes = local.axes(letter)
    if not axes:
        return local.emit(local.node.target, *[x, *local.node.args[1:]])
    masked = local.neutralise(x, letter, float("-inf"))
    peak = local.all_reduce(local.emit(aten.amax.default, masked, [dim], True), axes, "max")
    shifted = local.emit(aten.sub.Tensor, masked, peak)
    total = local.emit(aten.sum.dim_IntList, local.emit(aten.exp.default, shifted), [dim], True)
    return local.emit(aten.sub.Tensor, shifted, local.emit(aten.log.default, local.all_reduce(total, axes, "sum")))


def _log_softmax_backward(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    return Rule((letters, letters), (letters,), ({},), lower=_lower_log_softmax_backward, self_masked=True)


def _lower_log_softmax_backward(local) -> object:  # type: ignore[no-untyped-def]
    grad, out = local.operands
    dim = int(local.node.args[2]) % len(local.node.meta["meshc"].shape)
    axes = local.axes(f"d{dim}")
    if not axes:
        return local.emit(local.node.target, grad, out, *local.node.args[2:])
    masked = local.neutralise(grad, f"d{dim}", 0.0)
    total = local.all_reduce(local.emit(aten.sum.dim_IntList, masked, [dim], True), axes, "sum")
    return local.emit(aten.sub.Tensor, grad, local.emit(aten.mul.Tensor, local.emit(aten.exp.default, out), total))


RULES: dict[object, RuleFunction] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum_all,
    aten.mean.dim: _mean,
    aten.mean.default: _mean_all,
    aten.amax.default: _extreme("max"),
    aten.amin.default: _extreme("min"),
    aten.cumsum.default: lambda node, tensors: _softmax(node, tensors),
    aten.any.dim: _whole,
    aten.all.dim: _whole,
    aten.argmax.default: _whole,
    aten.max.dim: _whole,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
}
