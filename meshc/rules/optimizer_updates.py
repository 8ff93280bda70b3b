"""Sharding rules of optimizer updates, stored state (rounded or 8-bit) and squared norms: elementwise, but for the scales of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.fx import Node

from meshc.ops import block_codes as _coding_operators  # noqa: F401 - registers them
from meshc.ops import norm as _norm_operators  # noqa: F401 - registers them
from meshc.ops import optim as _update_operators  # noqa: F401 - registers them
from meshc.ops import state_rounding as _keeping_operators  # noqa: F401 - registers them
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import Rule, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

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


BLOCKS: Final = "_blocks"
"""The letter of the last dim of scales, which is whole: even with codes split along it, each rank has the scales of all blocks."""


def _block_scale(node: Node, tensors: list[Node]) -> Rule:
    """block_scale(value, global, local, offsets, last): a block on several ranks has the maximum of their parts."""
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    result, sums = (*letters[:-1], BLOCKS), {letters[-1]: "max"}
    return Rule((letters,), (result,), (sums,), whole=frozenset({BLOCKS}), kind="update", lower=_lower_block_scale)


def _encode_state(node: Node, tensors: list[Node]) -> Rule:
    """encode_state(codes, value, scale, seed_step, name, signed, global, local, offsets, last): draws and blocks by global index."""
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    operands = (letters, letters, (*letters[:-1], BLOCKS), ("_seed",))
    return Rule(operands, (letters,), ({},), whole=frozenset({BLOCKS, "_seed"}), kind="update", lower=_lower_encode_state)


def _decode_state(node: Node, tensors: list[Node]) -> Rule:
    """decode_state(codes, scale, signed, dtype, global, local, offsets, last)."""
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    operands = (letters, (*letters[:-1], BLOCKS))
    return Rule(operands, (letters,), ({},), whole=frozenset({BLOCKS}), kind="update", lower=_lower_decode_state)


def _lower_block_scale(local: Local) -> Node:
    return local.emit(meshc.block_scale.default, local.operands[0], *_tile(local))


def _lower_encode_state(local: Local) -> Node:
    codes, value, scale, seed_step = local.operands
    return local.emit(meshc.encode_state.default, codes, value, scale, seed_step, *local.node.args[4:6], *_tile(local))


def _lower_decode_state(local: Local) -> Node:
    codes, scale = local.operands
    return local.emit(meshc.decode_state.default, codes, scale, *local.node.args[2:4], *_tile(local))


def _tile(local: Local) -> tuple[object, ...]:
    """(global shape, local shape, offsets) of the value's tile with a dim for each factor, and the number of factors of the last dim."""
    letters = local.rule.operands[0]
    return *local.tile(letters), len(local.tile(letters[-1:])[0])


def _square_sum(node: Node, tensors: list[Node]) -> Rule:
    letters = tuple(f"d{i}" for i in range(len(shape_of(tensors[0]))))
    return Rule((letters,), ((),), ({letter: "sum" for letter in letters},), kind="update")


OPERATORS = declarations({
    "meshc.adam meshc.adam_amsgrad meshc.sgd meshc.sgd_plain meshc.round_param meshc.join_master": Operator(_update),
    "meshc.round_state": Operator(_round_state),
    "meshc.block_scale": Operator(_block_scale),
    "meshc.encode_state": Operator(_encode_state),
    "meshc.decode_state": Operator(_decode_state),
    "meshc.square_sum": Operator(_square_sum),
})
