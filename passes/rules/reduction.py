"""Reductions: the letters of the dims that go are summed (or maximised, ...); a mean divides by the global size.

A split softmax needs two small reductions over its rows: the maximum and the sum.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from meshc.ops import parts as _parts_operators  # noqa: F401 - registers meshc::sum_of_parts
from meshc.passes.rules.rule import ONE, Rule, RuleFunction, integer, pointwise, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.passes.partition.local import Local

aten = torch.ops.aten


def _reduce(node: Node, tensors: list[Node], dims: object, keep: bool, how: str | None, **changes: Any) -> Rule:
    (x,) = tensors
    shape = shape_of(x)
    letters = tuple(f"d{i}" for i in range(len(shape)))
    if dims is None or dims == []:
        gone = set(range(len(shape)))
    else:
        gone = {integer(d) % len(shape) for d in (dims if isinstance(dims, list | tuple) else [dims])} if shape else set()
    out = tuple(ONE if i in gone else letter for i, letter in enumerate(letters) if keep or i not in gone)
    reduced = {letters[i] for i in gone}
    count = len(result_shapes(node))
    if how is None:
        return Rule((letters,), (out,) * count, ({},) * count, whole=frozenset(reduced), **changes)
    return Rule((letters,), (out,) * count, ({letter: how for letter in reduced},) * count, **changes)


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


def _lower_mean(local: Local) -> Node:
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
        total = local.emit(aten.sum.dim_IntList, x, dims, keep, **{k: v for k, v in local.node.kwargs.items() if k == "dtype"})
    return local.emit(aten.mul.Tensor, total, 1.0 / size)


def _extreme(how: str) -> RuleFunction:
    neutral = float("-inf") if how == "max" else float("inf")

    def rule(node: Node, tensors: list[Node]) -> Rule:
        dims = _argument(node, 1, "dim", None)
        return _reduce(node, tensors, dims, bool(_argument(node, 2, "keepdim", False)), how, neutral=neutral)

    return rule


def _whole_at(dim: int, keep: int) -> RuleFunction:
    """A reduction over dims that must be whole, with its dims and keepdim at these argument positions (-1: it has none)."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        dims = _argument(node, dim, "dim", None) if dim >= 0 else None
        return _reduce(node, tensors, dims, bool(_argument(node, keep, "keepdim", False)) if keep >= 0 else False, None)

    return rule


def _extreme_all(how: str) -> RuleFunction:
    neutral = float("-inf") if how == "max" else float("inf")
    return lambda node, tensors: _reduce(node, tensors, None, False, how, neutral=neutral)


def _ordered(dim: int, default: int) -> RuleFunction:
    """sort, topk, scans: everything along one dim together, which may come out shorter."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        shape = shape_of(tensors[0])
        letters = tuple(f"d{i}" for i in range(len(shape)))
        if not shape:
            return Rule((letters,), (letters,) * len(result_shapes(node)), ({},) * len(result_shapes(node)))
        position = integer(_argument(node, dim, "dim", default)) % len(shape)
        outs = []
        for result in result_shapes(node):
            same = result[position] == shape[position]
            outs.append(letters if same else tuple("o" if i == position else letter for i, letter in enumerate(letters)))
        return Rule((letters,), tuple(outs), ({},) * len(outs), whole=frozenset({letters[position], "o"}))

    return rule


def _triangle(node: Node, tensors: list[Node]) -> Rule:
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    return Rule((letters,), (letters,), ({},), lower=_lower_triangle)


def _lower_triangle(local: Local) -> Node:
    """Rows and columns by their global positions."""
    (x,) = local.operands
    node = local.node
    rank = len(local.shape(x))
    row, column = f"d{rank - 2}", f"d{rank - 1}"
    if not local.axes(row) and not local.axes(column):
        return local.emit(node.target, x, *node.args[1:], **node.kwargs)
    diagonal = _argument(node, 1, "diagonal", 0)
    device = torch.device("cpu")
    rows = local.emit(aten.unsqueeze.default, local.positions(row, torch.int64, device), -1)
    distance = local.emit(aten.sub.Tensor, local.positions(column, torch.int64, device), rows)
    kept = local.emit((aten.le if node.target is aten.tril.default else aten.ge).Scalar, distance, diagonal)
    return local.emit(aten.where.ScalarOther, kept, x, 0)


def _softmax(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    dim = integer(node.args[1]) % len(shape)
    return Rule((letters,), (letters,), ({},), whole=frozenset({letters[dim]}))


def _softmax_backward(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    dim = integer(node.args[2]) % len(shape)
    return Rule((letters, letters), (letters,), ({},), whole=frozenset({letters[dim]}))


def _log_softmax(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    return Rule((letters,), (letters,), ({},), lower=_lower_log_softmax, self_masked=True)


def _lower_log_softmax(local: Local) -> Node:
    (x,) = local.operands
    dim = integer(local.node.args[1]) % len(local.node.meta["meshc"].shape)
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


def _lower_log_softmax_backward(local: Local) -> Node:
    grad, out = local.operands
    dim = integer(local.node.args[2]) % len(local.node.meta["meshc"].shape)
    axes = local.axes(f"d{dim}")
    if not axes:
        return local.emit(local.node.target, grad, out, *local.node.args[2:])
    masked = local.neutralise(grad, f"d{dim}", 0.0)
    total = local.all_reduce(local.emit(aten.sum.dim_IntList, masked, [dim], True), axes, "sum")
    return local.emit(aten.sub.Tensor, grad, local.emit(aten.mul.Tensor, local.emit(aten.exp.default, out), total))


def _sum_of_parts(node: Node, tensors: list[Node]) -> Rule:
    """A microbatch's share of a sum over microbatches: it lies as it is made, and what is pending waits for all of them."""
    return pointwise(node, tensors, kind="carry", linear="each", accumulates=True, lower=lambda local: local.operands[0])


RULES: dict[object, RuleFunction] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum_all,
    aten.mean.dim: _mean,
    aten.mean.default: _mean_all,
    aten.amax.default: _extreme("max"),
    aten.amin.default: _extreme("min"),
    aten.max.default: _extreme_all("max"),
    aten.min.default: _extreme_all("min"),
    **{op: _whole_at(1, 2) for op in (aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims, aten.max.dim, aten.min.dim)},
    **{op: _whole_at(1, 2) for op in (aten.argmax.default, aten.argmin.default, aten.prod.dim_int, aten.logsumexp.default)},
    **{op: _whole_at(1, 3) for op in (aten.var.correction, aten.std.correction)},
    **{op: _whole_at(2, 3) for op in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)},
    **{op: _whole_at(-1, -1) for op in (aten.any.default, aten.all.default, aten.prod.default)},
    **{op: _ordered(1, -1) for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.sort.default)},
    aten.cummax.default: _ordered(1, -1),
    aten.cummin.default: _ordered(1, -1),
    aten.sort.stable: _ordered(2, -1),
    aten.topk.default: _ordered(2, -1),
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    torch.ops.meshc.sum_of_parts.default: _sum_of_parts,
}
