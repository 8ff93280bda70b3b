"""Sharding rules of reductions whose result stays partial over the axes of a reduced dim: sum, mean, max, any and others.

A mean divides by the global size. Booleans are numbers here: `any` is a maximum, `all` a minimum.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from meshc.ir.reductions import REDUCTIONS
from meshc.ops import sum_of_parts as _parts_operators  # noqa: F401 - registers meshc::sum_of_parts
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ALONE, ONE, Rule, RuleFunction, integer, pointwise, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten


def reduce(node: Node, tensors: list[Node], dims: object, keep: bool, how: str | None, **changes: Any) -> Rule:
    """The rule of a reduction of `dims` (None or []: all) of an operand d0, d1, ... by `how`; `how` None: these dims must be whole.

    Padding has the neutral number of `how`, unless `changes` have another.
    """
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
    changes.setdefault("neutral", REDUCTIONS[how].neutral)
    return Rule((letters,), (out,) * count, ({letter: how for letter in reduced},) * count, **changes)


def argument(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _sum(node: Node, tensors: list[Node]) -> Rule:
    dims = argument(node, 1, "dim", None)
    return reduce(node, tensors, dims, bool(argument(node, 2, "keepdim", False)), "sum", kind="carry", linear=ALONE, defers=True)


def _sum_all(node: Node, tensors: list[Node]) -> Rule:
    return reduce(node, tensors, None, False, "sum", kind="carry", linear=ALONE, defers=True)


def _mean(node: Node, tensors: list[Node]) -> Rule:
    """A mean over the last dim has the role `hidden`, as part of a norm that the model computes itself."""
    dims = argument(node, 1, "dim", None)
    roles = {f"d{len(shape_of(tensors[0])) - 1}": "hidden"} if dims in ([-1], (-1,)) else {}
    keep = bool(argument(node, 2, "keepdim", False))
    return reduce(node, tensors, dims, keep, "sum", linear=ALONE, defers=True, lower=_lower_mean, roles=roles)


def _mean_all(node: Node, tensors: list[Node]) -> Rule:
    return reduce(node, tensors, None, False, "sum", linear=ALONE, defers=True, lower=_lower_mean)


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
    return local.emit(aten.mul.Tensor, total, 1 / size)


def _extreme(how: str, **changes: Any) -> RuleFunction:
    def rule(node: Node, tensors: list[Node]) -> Rule:
        dims = argument(node, 1, "dim", None)
        return reduce(node, tensors, dims, bool(argument(node, 2, "keepdim", False)), how, **changes)

    return rule


def _extreme_all(how: str) -> RuleFunction:
    return lambda node, tensors: reduce(node, tensors, None, False, how)


def _truth(how: str) -> RuleFunction:
    """any (max; padding is false) and all (min; padding is true), over one dim, several, or all."""
    return _extreme(how, neutral=min(max(REDUCTIONS[how].neutral, 0.0), 1.0))


def _count(node: Node, tensors: list[Node]) -> Rule:
    """count_nonzero and nansum: sums of a function of x, so not linear in x."""
    dims = argument(node, 1, "dim", None)
    return reduce(node, tensors, dims, bool(argument(node, 2, "keepdim", False)), "sum")


def _histc(node: Node, tensors: list[Node]) -> Rule:
    """Elements in each bin: counts add up if the borders are given, and padding is infinite, beyond them. Without borders (min = max) they
    depend on the data, which must be whole.
    """
    (x,) = tensors
    letters = tuple(f"d{i}" for i in range(len(shape_of(x))))
    if argument(node, 2, "min", 0) == argument(node, 3, "max", 0):
        return Rule((letters,), (("bins",),), ({},), whole=frozenset({"bins", *letters}))
    return Rule((letters,), (("bins",),), (dict.fromkeys(letters, "sum"),), frozenset({"bins"}), kind="carry", neutral=float("inf"))


def _sum_of_parts(node: Node, tensors: list[Node]) -> Rule:
    """A microbatch's term of a sum over microbatches: it keeps its sharding, and its reduction is deferred past all microbatches."""
    return pointwise(node, tensors, kind="carry", linear=ALONE, defers=True, accumulates=True, lower=lambda local: local.operands[0])


OPERATORS = declarations({
    "sum.dim_IntList": Operator(_sum, one_pass=True, any_order=True, cheap=True),
    "sum": Operator(_sum_all, one_pass=True, any_order=True, cheap=True),
    "mean.dim": Operator(_mean, one_pass=True, any_order=True, cheap=True),
    "mean": Operator(_mean_all, one_pass=True, any_order=True, cheap=True),
    "nansum count_nonzero count_nonzero.dim_IntList": Operator(_count),
    "histc": Operator(_histc),
    "amax": Operator(_extreme("max"), one_pass=True, reduction="max", cheap=True),
    "amin": Operator(_extreme("min"), one_pass=True, reduction="min", cheap=True),
    "max": Operator(_extreme_all("max"), reduction="max"),
    "min": Operator(_extreme_all("min"), reduction="min"),
    "any any.dim": Operator(_truth("max"), one_pass=True),
    "any.dims": Operator(_truth("max")),
    "all": Operator(_truth("min"), one_pass=True),
    "all.dim all.dims": Operator(_truth("min")),
    "meshc.sum_of_parts": Operator(_sum_of_parts),
})
