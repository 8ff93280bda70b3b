"""Sharding rules of reductions whose result stays partial over the axes of a reduced dim: sum, mean, max, any and others.

A mean divides by the global size. Booleans are numbers here: `any` is a maximum, `all` a minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.ir.reductions import REDUCTIONS
from meshc.ir.schemas import named_arguments
from meshc.ops import sum_of_parts as _parts_operators  # noqa: F401 - registers meshc::sum_of_parts
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ALONE, ONE, Local, Made, Rule, RuleFunction, letters_of, pointwise, result_shapes

aten = torch.ops.aten


def reduce(node: Node, tensors: list[Node], how: str | None, **changes: Any) -> Rule:
    """The rule of a reduction by `how` of an operand d0, d1, ... over the dims of the call (None or []: all); `how` None: these are whole.

    Padding has the neutral number of `how`, unless `changes` have another.
    """
    named, letters = named_arguments(node), letters_of(tensors[0])
    dims = named.get("dim")
    gone = set(letters)
    if dims is not None and dims != [] and letters:
        gone = {letters[d] for d in (dims if isinstance(dims, list | tuple) else [dims])}
    out = tuple(ONE if letter in gone else letter for letter in letters if named.get("keepdim") or letter not in gone)
    count = len(result_shapes(node))
    if how is None:
        return Rule((letters,), (out,) * count, whole=gone, **changes)
    sums = {letter: how for letter in letters if letter in gone}
    return Rule((letters,), (out,) * count, (sums,) * count, **{"neutral": REDUCTIONS[how].neutral, **changes})


def reduction_rule(how: str | None, **changes: Any) -> RuleFunction:
    """`reduce` as a rule function."""
    return lambda node, tensors: reduce(node, tensors, how, **changes)


def completed_rule(lower: Callable[[Local, list[str], list[str]], Made]) -> RuleFunction:
    """The rule of a reduction of dims that may be split: `lower(local, their letters, axes that split them)` then completes the result."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        found = reduce(node, tensors, None)
        return replace(found, whole=frozenset(), lower=lambda local: _lower(local, sorted(found.whole)), self_masked=True)

    def _lower(local: Local, letters: list[str]) -> Made:
        axes = [axis for letter in letters for axis in local.axes(letter)]
        return lower(local, letters, axes) if axes else local.call(*local.operands)

    return rule


def _mean(node: Node, tensors: list[Node]) -> Rule:
    """A mean over the last dim has the role `hidden`, as part of a norm that the model computes itself."""
    last = named_arguments(node).get("dim") in ([-1], (-1,))
    roles = dict.fromkeys(letters_of(tensors[0])[-1:], "hidden") if last else {}
    return reduce(node, tensors, "sum", linear=ALONE, defers=True, lower=_lower_mean, roles=roles)


def _lower_mean(local: Local) -> Node:
    (x,) = local.operands
    split = list(local.rule.sums[0])
    if not any(local.axes(letter) for letter in split):
        return local.call(x)
    named = named_arguments(local.node)
    size = prod(local.global_size(letter) for letter in split)
    over = [named[name] for name in ("dim", "keepdim") if name in named]
    total = local.emit(aten.sum.dim_IntList if over else aten.sum.default, x, *over, **result_dtype(local))
    return local.emit(aten.mul.Tensor, total, 1 / size)


def result_dtype(local: Local) -> dict[str, object]:
    """The keyword `dtype` of the call, if it has one."""
    asked = local.node.kwargs.get("dtype")
    return {} if asked is None else {"dtype": asked}


def _histc(node: Node, tensors: list[Node]) -> Rule:
    """Elements in each bin: counts add up if the borders are given, and padding is infinite, beyond them. Without borders (min = max) they
    depend on the data, which must be whole.
    """
    named, letters = named_arguments(node), letters_of(tensors[0])
    if named["min"] == named["max"]:
        return Rule((letters,), (("bins",),), whole={"bins", *letters})
    return Rule((letters,), (("bins",),), (dict.fromkeys(letters, "sum"),), {"bins"}, kind="carry", neutral=float("inf"))


def _sum_of_parts(node: Node, tensors: list[Node]) -> Rule:
    """A microbatch's term of a sum over microbatches: it keeps its sharding, and its reduction is deferred past all microbatches."""
    return pointwise(node, tensors, kind="carry", linear=ALONE, defers=True, accumulates=True, lower=lambda local: local.operands[0])


OPERATORS = declarations({
    "sum sum.dim_IntList": Operator(
        reduction_rule("sum", kind="carry", linear=ALONE, defers=True), one_pass=True, any_order=True, cheap=True
    ),
    "mean mean.dim": Operator(_mean, one_pass=True, any_order=True, cheap=True),
    "nansum count_nonzero count_nonzero.dim_IntList": Operator(reduction_rule("sum")),  # of a function of x, so not linear in x
    "histc": Operator(_histc),
    "amax": Operator(reduction_rule("max"), one_pass=True, reduction="max", cheap=True),
    "amin": Operator(reduction_rule("min"), one_pass=True, reduction="min", cheap=True),
    "max": Operator(reduction_rule("max"), reduction="max"),
    "min": Operator(reduction_rule("min"), reduction="min"),
    "any any.dim": Operator(reduction_rule("max", neutral=0.0), one_pass=True),
    "any.dims": Operator(reduction_rule("max", neutral=0.0)),
    "all": Operator(reduction_rule("min", neutral=1.0), one_pass=True),
    "all.dim all.dims": Operator(reduction_rule("min", neutral=1.0)),
    "meshc.sum_of_parts": Operator(_sum_of_parts),
})
