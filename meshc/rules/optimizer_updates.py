"""Sharding rules of optimizer updates, stored state and numbers of whole gradients: elementwise, but for the scales of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.fx import Node

from meshc.ops import block_codes as _coding_operators  # noqa: F401 - registers them
from meshc.ops import norm as _norm_operators  # noqa: F401 - registers them
from meshc.ops import optim as _update_operators  # noqa: F401 - registers them
from meshc.ops import state_rounding as _keeping_operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import Local, Rule, RuleFunction, draw, letters_of, pointwise, result_shapes, shape_of

meshc = torch.ops.meshc


BLOCKS: Final = "_blocks"
"""The letter of the last dim of scales, which is whole: even with codes split along it, each rank has the scales of all blocks."""


def _update(node: Node, tensors: list[Node]) -> Rule:
    shape, letters = shape_of(tensors[0]), letters_of(tensors[0])
    operands, results = (
        tuple(letters if each == shape else () for each in shapes) for shapes in (map(shape_of, tensors), result_shapes(node))
    )
    return Rule(operands, results, kind="update")


def _stored_state(operands: str, lower: Callable[[Local], Node]) -> RuleFunction:
    """The rule of an operator on a rank's tile of stored state, by global index, so that any factor may be split. `operands` says for each
    whether it is a value, the scales of its blocks or the seed of the step."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        letters = letters_of(tensors[0])
        dims = {"value": letters, "scale": (*letters[:-1], BLOCKS), "seed": ("_seed",)}
        return Rule(
            tuple(dims[each] for each in operands.split()), (letters,), whole={BLOCKS, "_seed"}, kind="update", lower=lower
        )

    return rule


def _block_scale(node: Node, tensors: list[Node]) -> Rule:
    """block_scale(value, global, local, offsets, last): a block on several ranks has the maximum of their parts."""
    letters = letters_of(tensors[0])
    return Rule((letters,), ((*letters[:-1], BLOCKS),), ({letters[-1]: "max"},), {BLOCKS}, kind="update", lower=lower_blocks)


def lower_blocks(local: Local) -> Node:
    """The operator itself on its tile. The value's tile has a dim for each factor; `last` is the number of factors of the last dim."""
    letters = local.rule.operands[0]
    return local.call(*local.operands, **local.tile(letters), last=len(local.tile(letters[-1:])["offsets"]))


def _widen_sum(node: Node, tensors: list[Node]) -> Rule:
    """A cast past which reductions of sums are deferred: what is sent has the dtype of the result."""
    return pointwise(node, tensors, kind="carry", linear=((0,),), defers=True, always=True)


def _number_of(reduction: str) -> RuleFunction:
    """The rule of a number of a whole tensor, which is the sum, or the maximum, of those of its parts."""

    def rule(node: Node, tensors: list[Node]) -> Rule:
        letters = letters_of(tensors[0])
        return Rule((letters,), ((),), (dict.fromkeys(letters, reduction),), kind="update")

    return rule


OPERATORS = declarations({
    "meshc.adam meshc.adam_amsgrad meshc.sgd meshc.sgd_plain meshc.round_param meshc.join_master meshc.update_if": Operator(_update),
    "meshc.round_state": Operator(_stored_state("value value seed", draw)),
    "meshc.block_scale": Operator(_block_scale),
    "meshc.encode_state": Operator(_stored_state("value value scale seed", lower_blocks)),
    "meshc.decode_state": Operator(_stored_state("value scale", lower_blocks)),
    "meshc.widen_sum": Operator(_widen_sum, moves=True, cheap=True),
    "meshc.square_sum": Operator(_number_of("sum")),
    "meshc.non_finite": Operator(_number_of("max")),
})
