"""Update operators of optimizers: elementwise in parameter, gradient and state; numbers and step counters have no dims."""

from __future__ import annotations

import torch
from torch.fx import Node

from meshc.ops import norm as _norm_operators  # noqa: F401 - registers them
from meshc.ops import optim as _update_operators  # noqa: F401 - registers them
from meshc.passes.rules.rule import Rule, RuleFunction, result_shapes, shape_of

meshc = torch.ops.meshc


def _update(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    ins = tuple(letters if shape_of(t) == shape else () for t in tensors)
    outs = tuple(letters if result == shape else () for result in result_shapes(node))
    return Rule(ins, outs, ({},) * len(outs), kind="update")


def _square_sum(node: Node, tensors: list[Node]) -> Rule:
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    return Rule((letters,), ((),), ({letter: "sum" for letter in letters},), kind="update")


RULES: dict[object, RuleFunction] = {
    meshc.adam.default: _update,
    meshc.adam_amsgrad.default: _update,
    meshc.sgd.default: _update,
    meshc.sgd_plain.default: _update,
    meshc.square_sum.default: _square_sum,
}
