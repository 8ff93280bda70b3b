"""Update operators of optimizers: elementwise in parameter, gradient and state; numbers and step counters have no dims."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.ops import keep as _keeping_operators  # noqa: F401 - registers them
from meshc.ops import norm as _norm_operators  # noqa: F401 - registers them
from meshc.ops import optim as _update_operators  # noqa: F401 - registers them
from meshc.passes.rules.rule import Rule, RuleFunction, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.passes.rules.local import Local

meshc = torch.ops.meshc


def _update(node: Node, tensors: list[Node]) -> Rule:
    shape = shape_of(tensors[0])
    letters = tuple(f"d{i}" for i in range(len(shape)))
    ins = tuple(letters if shape_of(t) == shape else () for t in tensors)
    outs = tuple(letters if result == shape else () for result in result_shapes(node))
    return Rule(ins, outs, ({},) * len(outs), kind="update")


def _round_state(node: Node, tensors: list[Node]) -> Rule:
    """round_state(state, value, seed_step, name, global, local, offsets): draws by global index, so any factor may be split."""
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    operands = (letters, letters, ("_seed",))
    return Rule(operands, (letters,), ({},), whole=frozenset({"_seed"}), kind="update", lower=_lower_round_state)


def _lower_round_state(local: Local) -> Node:
    state, value, seed_step = local.operands
    return local.emit(meshc.round_state.default, state, value, seed_step, local.node.args[3], *local.tiles(0))


def _square_sum(node: Node, tensors: list[Node]) -> Rule:
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    return Rule((letters,), ((),), ({letter: "sum" for letter in letters},), kind="update")


RULES: dict[object, RuleFunction] = {
    meshc.adam.default: _update,
    meshc.adam_amsgrad.default: _update,
    meshc.sgd.default: _update,
    meshc.sgd_plain.default: _update,
    meshc.round_state.default: _round_state,
    meshc.round_param.default: _update,
    meshc.join_master.default: _update,
    meshc.square_sum.default: _square_sum,
}
