"""Operators that store update results: rounded to fewer bits by a draw or to the nearest, as master weights, or not at all.

    new_state = meshc.round_state(state, value, seed_step, "w/exp_avg", global_shape, local_shape, offsets)     bfloat16, by a draw
    new_param = meshc.round_param(param, value)                                                                 to the nearest
    new_master = meshc.join_master(master, param)                                                               float32
    new_value = meshc.update_if(value, updated, applies)                         updated if the 0-dim `applies` is true, else value

The first operand is the value stored so far; each operator has a twin `NAME_` that writes into this operand. docs/randomness.md defines
the draws of `round_state`: its call is numbered by a name, so that neither the order nor the number of states matters.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from meshc.ops import philox
from meshc.ops.definition import misfit, register_kernel
from meshc.ops.tile import tile_of

Shape = Sequence[int]
FIRST_CALL = 1 << 31
"""First number of the random calls of updates; smaller numbers are those of the model."""

_DRAWN = "Tensor seed_step, str name, SymInt[] global_shape, SymInt[] local_shape, SymInt[] offsets"


def call_named(name: str) -> int:
    """The number of the random call that rounds a state, by the state's name ("layers.0.weight/exp_avg")."""
    return FIRST_CALL | zlib.crc32(name.encode()) & (FIRST_CALL - 1)


def round_state(value: Tensor, seed_step: Tensor, name: str) -> Tensor:
    """Stochastic rounding of a full value to bfloat16: up with a probability equal to the fraction that is cut off."""
    shape = list(value.shape)
    return torch.ops.meshc.round_state(value.new_empty(shape, dtype=torch.bfloat16), value, seed_step, name, shape, shape, [0] * len(shape))


# ------------------------------------------------------------------------------------------------------------------ in place


def _round_state(
    state: Tensor, value: Tensor, seed_step: Tensor, name: str, global_shape: Shape, local_shape: Shape, offsets: Shape
) -> None:
    """Add 16 random bits to the pattern of a float32 and drop its lower half; overflow gives infinity, NaN stays NaN."""
    _fit_rounding(state, value, seed_step, name, global_shape, local_shape, offsets)
    tile = tile_of(global_shape, local_shape, offsets)
    value = value.to(torch.float32).contiguous()
    if value.device.type == "cpu" and philox.library() is not None:
        out = state if state.is_contiguous() else torch.empty(state.shape, dtype=state.dtype)
        philox.draw("round16", tile, out, seed_step=seed_step, call=call_named(name), x=value)
    else:
        drawn = torch.empty(value.shape, dtype=torch.float32, device=value.device)
        philox.draw("uniform32", tile, drawn, seed_step=seed_step, call=call_named(name))
        pattern = value.view(torch.int32) + drawn.mul_(65536.0).to(torch.int32)  # wraps for NaN alone
        out = torch.where(value.isnan(), torch.nan, (pattern & -65536).view(torch.float32)).to(torch.bfloat16)
    if out is not state:
        state.copy_(out.view(state.shape))


def _round_param(param: Tensor, value: Tensor) -> None:
    _fit_alike("round_param", param, value)
    param.copy_(value)


def _join_master(master: Tensor, param: Tensor) -> None:
    """Master values, replaced by the parameter's where the parameter is not their rounding: it was set from outside."""
    _fit_alike("join_master", master, param)
    changed = master.to(param.dtype) != param
    if changed.is_cuda or bool(changed.any()):  # `any` on a GPU would wait for the device
        master.copy_(torch.where(changed, param.to(master.dtype), master))


def _update_if(old: Tensor, value: Tensor, applies: Tensor) -> None:
    _fit_update(old, value, applies)
    if applies.is_cuda:  # reading it would make the host wait for the device
        old.copy_(torch.where(applies, value, old))
    elif applies:
        old.copy_(value)


def _fit_rounding(
    state: Tensor, value: Tensor, seed_step: Tensor, name: str, global_shape: Shape, local_shape: Shape, offsets: Shape
) -> None:
    _fit_alike("round_state", state, value)
    if state.dtype != torch.bfloat16 or value.dtype not in (torch.float32, torch.float64):
        raise misfit("round_state", "a state in bfloat16 of a value in float32 or float64", state=state, value=value)
    if seed_step.dtype != torch.int64 or seed_step.shape != (2,) or seed_step.device != state.device:
        raise misfit("round_state", "seed_step is int64 [2], where the state lies", seed_step=seed_step, state=state)
    if not len(global_shape) == len(local_shape) == len(offsets):
        raise ValueError(f"global shape {global_shape}, local shape {local_shape} and offsets {offsets} differ in length")
    if math.prod(local_shape) != value.numel():
        raise misfit("round_state", f"the tile {list(local_shape)} has as many elements as the value", value=value)


def _fit_alike(name: str, kept: Tensor, value: Tensor) -> None:
    if kept.shape != value.shape or kept.device != value.device or not (kept.is_floating_point() and value.is_floating_point()):
        raise misfit(name, "what is kept and what is new have one shape and one device, and are floating", kept=kept, value=value)


def _fit_update(old: Tensor, value: Tensor, applies: Tensor) -> None:
    if old.shape != value.shape or old.dtype != value.dtype or applies.shape != () or applies.dtype != torch.bool:
        rule = "an old and a new value of one shape and dtype, and one truth value"
        raise misfit("update_if", rule, old=old, value=value, applies=applies)


# ------------------------------------------------------------------------------------------------------------------ registration


IN_PLACE: Final[dict[torch._ops.OpOverload, torch._ops.OpOverload]] = {}
"""Functional operator -> its twin that writes into the first operand."""


def define(name: str, kept: str, rest: str, kernel: Callable[..., None], fit: Callable[..., None]) -> None:
    """Register an operator and its twin. `kept`: name of the first operand; `kernel` writes into it, `fit` raises on a mismatch."""

    def functional(first, *others):  # type: ignore[no-untyped-def]
        result = first.clone()
        kernel(result, *others)
        return result

    def functional_fake(first, *others):  # type: ignore[no-untyped-def]
        fit(first, *others)
        return torch.empty_like(first)

    register_kernel(f"{name}(Tensor {kept}, {rest}) -> Tensor", functional, functional_fake)
    register_kernel(f"{name}_(Tensor(a!) {kept}, {rest}) -> ()", kernel, fit)
    IN_PLACE[getattr(torch.ops.meshc, name).default] = getattr(torch.ops.meshc, f"{name}_").default


define("round_state", "state", f"Tensor value, {_DRAWN}", _round_state, _fit_rounding)
define("round_param", "param", "Tensor value", _round_param, lambda kept, value: _fit_alike("round_param", kept, value))
define("join_master", "master", "Tensor param", _join_master, lambda kept, value: _fit_alike("join_master", kept, value))
define("update_if", "old", "Tensor value, Tensor applies", _update_if, _fit_update)
