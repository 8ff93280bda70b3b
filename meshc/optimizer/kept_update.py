"""One parameter's update as operators under the options of `Training`: state in fewer bits, master weights, kept gradients.

    optimizer_state="bf16"    m32 = m.float(); w, m32 = adam(w, g, m32, ...); m = round_state(m, m32, ...)     up or down by a draw
    optimizer_state="8bit"    m32 = decode(m); w, m32 = adam(w, grad, m32, ...); m = encode(m32)       codes and scales of blocks
    keep_gradients=True       kept = grad, the value of `parameter.grad` after the call
    master_weights=True       w32 = join_master(master, w); w32, ... = adam(w32, g.float(), ...); master = w32; w = round_param(w, w32)

With any of them, an update of 16-bit parameters computes in float32. Scalars (step counts), complex and 64-bit integer state stay as they
are; in 8 bits, so does state with rows shorter than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from meshc.ops import block_codes as _coded  # noqa: F401 - registers operators
from meshc.ops import state_rounding as _keep  # noqa: F401 - registers operators
from meshc.optimizer.emit import update_nodes
from meshc.optimizer.spec import CODES, GRADIENT, MASTER, SCALE, GroupSpec

Value = TypeVar("Value")


def kept_update(
    group: GroupSpec,
    name: str,
    param: Value,
    grad: Value,
    state: Mapping[str, Value],
    numbers: Mapping[str, Value],
    call: Callable[..., Value],
    like: Tensor,
    parameter: Tensor,
    seed_step: Callable[[], Value],
    applies: Value | None = None,
) -> tuple[Value, dict[str, Value]]:
    """`update_nodes` on stored values. `like`: a meta tensor of the parameter; `seed_step`: seed of the draws, None without any. `applies`:
    whether what is rounded is updated, None if it always is; results that are not rounded are left to the caller."""
    aten, meshc = torch.ops.aten, torch.ops.meshc
    slots = group.slots_of(parameter)
    narrow = {slot.name: slot.computed for slot in slots if slot.computed is not None and not slot.part}
    coded = {slot.plain: slot for slot in slots if slot.part == CODES}
    has_master = any(slot.name == MASTER for slot in slots)
    computed = group.keeping.compute_dtype(like.dtype)

    def cast(value: Value, dtype: torch.dtype) -> Value:
        return call(aten._to_copy.default, value, dtype=dtype)

    wide, given, gradient = param, dict(state), grad
    kept_gradient = given.pop(GRADIENT, None)
    if has_master:
        wide = call(meshc.join_master.default, given.pop(MASTER), param)
    elif computed != like.dtype:
        wide = cast(param, computed)
    if computed != like.dtype:
        grad = cast(grad, computed)
    given = {slot: cast(value, narrow[slot]) if slot in narrow else value for slot, value in given.items()}
    shape = list(like.shape)
    tile = (shape, shape, [0] * len(shape))
    for slot, kept in coded.items():
        pair = given.pop(slot + CODES), given.pop(slot + SCALE)
        given[slot] = call(meshc.decode_state.default, *pair, kept.signed, kept.computed, *tile, 1)
    new, after = update_nodes(group, wide, grad, given, numbers, call, like.to(computed))
    if new is wide:
        return param, dict(state)
    if applies is not None:  # values of few bits round to themselves
        new = call(aten.where.self, applies, new, wide) if computed != like.dtype else new
        after |= {slot: call(aten.where.self, applies, after[slot], given[slot]) for slot in (*narrow, *coded)}
    for slot in narrow:
        after[slot] = call(meshc.round_state.default, state[slot], after[slot], seed_step(), f"{name}/{slot}", *tile)
    for slot, kept in coded.items():
        value = after.pop(slot)
        after[slot + SCALE] = call(meshc.block_scale.default, value, *tile, 1)
        drawn = (after[slot + SCALE], seed_step(), f"{name}/{slot}", kept.signed)
        after[slot + CODES] = call(meshc.encode_state.default, state[slot + CODES], value, *drawn, *tile, 1)
    if has_master:
        after[MASTER] = new
    if kept_gradient is not None:
        after[GRADIENT] = call(meshc.round_param.default, kept_gradient, gradient)
    return (call(meshc.round_param.default, param, new) if computed != like.dtype else new), after
