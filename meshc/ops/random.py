"""`meshc::` random operators: every draw is a function of (seed, step, call, index of the global element), never of the mesh.

    uniform   (seed_step, call, global_shape, local_shape, offsets, dtype) -> local_shape, in [0, 1)
    normal    (seed_step, call, global_shape, local_shape, offsets, dtype) -> local_shape, mean 0, variance 1
    keep_mask (seed_step, call, p, global_shape, local_shape, offsets) -> bool local_shape, true with probability 1 - p
    dropout   (x, seed_step, call, p, global_shape, local_shape, offsets) -> out, mask in x's shape; one node forward, one backward

`seed_step` is int64 [2] on the device that draws. Local element (i0, i1, ...) is element (offset_k + i_k) of `global_shape`, row-major;
elements past its end are padding with arbitrary finite draws. docs/randomness.md has the definition to the letter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshc.ops import philox
from meshc.ops.definition import misfit, operator, ops
from meshc.ops.tile import Tile, tile_of

Shape = Sequence[int]
_TILE = "SymInt[] global_shape, SymInt[] local_shape, SymInt[] offsets"


FIRST_VALUES = (1 << 32) - 1
"""The step whose draws initialise a model, beyond every training step."""


def seed_step(seed: int, step: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """The int64 tensor [2] that the operators read: the 64 bits of `seed` (as torch.initial_seed() gives them) and the step."""
    return torch.tensor([_to_signed_int64(seed), _to_signed_int64(step)], dtype=torch.int64, device=device)


def keep_threshold(keep: float) -> int:
    """The integer t of "keep where (word >> 8) >= t", for a probability `keep`; its resolution is 2^-24.

    It is a function of the probability to keep, because torch's own dropout hands `1 - p` to `bernoulli_`: both round the same number.
    """
    if not 0.0 <= keep <= 1.0:
        raise ValueError(f"a probability must lie in [0, 1], not {keep}")
    return (1 << 24) - round(keep * (1 << 24))


def keep_scale(p: float) -> float:
    """Factor of kept elements: 1 / (1 - p), or 0 for p = 1."""
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


# ---------------------------------------------------------------------------------------------------------------------- operators


def _draw_numbers(kind: str, seed_step: Tensor, call: int, tile: Tile, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Draws of one kind, in double precision if `dtype` is float64, else in single."""
    bits = 64 if dtype == torch.float64 else 32
    out = torch.empty(tuple(shape), dtype=torch.float64 if bits == 64 else torch.float32, device=seed_step.device)
    philox.draw(f"{kind}{bits}", tile, out, seed_step=seed_step, call=call)
    return out


def _fit_draw(operator: str, seed_step: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape) -> None:
    """Raises ValueError for what is no seed, and as `tile_of` does, as far as symbolic sizes are known."""
    if seed_step.dtype != torch.int64 or seed_step.shape != (2,):
        raise misfit(operator, "seed_step is int64 [2]", seed_step=seed_step)
    if not len(global_shape) == len(local_shape) == len(offsets):
        raise ValueError(f"global shape {global_shape}, local shape {local_shape} and offsets {offsets} differ in length")


def _fit_dropout(operator: str, x: Tensor, seed_step: Tensor, global_shape: Shape, local_shape: Shape, offsets: Shape) -> None:
    _fit_draw(operator, seed_step, global_shape, local_shape, offsets)
    if math.prod(local_shape) != x.numel() or x.device != seed_step.device:
        raise misfit(operator, f"x holds the local shape {list(local_shape)}, where seed_step is", x=x, seed_step=seed_step)


def _of_dropped(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient of dropout, and of its gradient."""
    return ops.dropout_backward(grad, mask, p)


@operator(
    "uniform", results=lambda seed_step, local_shape, dtype: seed_step.new_empty(tuple(local_shape), dtype=dtype), fit=_fit_draw,
    schema=f"(Tensor seed_step, int call, {_TILE}, ScalarType dtype) -> Tensor",
)  # fmt: skip
def _uniform(seed_step: Tensor, call: int, global_shape: Shape, local_shape: Shape, offsets: Shape, dtype: torch.dtype) -> Tensor:
    out = _draw_numbers("uniform", seed_step, call, tile_of(global_shape, local_shape, offsets), local_shape, dtype)
    if dtype in (torch.float16, torch.bfloat16):  # rounded down to the precision of `dtype`, or the result could be 1
        unit = 2.0 / torch.finfo(dtype).eps
        return out.mul_(unit).floor_().div_(unit).to(dtype)
    return out.to(_floating(dtype))


@operator(
    "normal", results=lambda seed_step, local_shape, dtype: seed_step.new_empty(tuple(local_shape), dtype=dtype), fit=_fit_draw,
    schema=f"(Tensor seed_step, int call, {_TILE}, ScalarType dtype) -> Tensor",
)  # fmt: skip
def _normal(seed_step: Tensor, call: int, global_shape: Shape, local_shape: Shape, offsets: Shape, dtype: torch.dtype) -> Tensor:
    return _draw_numbers("normal", seed_step, call, tile_of(global_shape, local_shape, offsets), local_shape, dtype).to(_floating(dtype))


@operator(
    "keep_mask", results=lambda seed_step, local_shape: seed_step.new_empty(tuple(local_shape), dtype=torch.bool), fit=_fit_draw,
    schema=f"(Tensor seed_step, int call, float p, {_TILE}) -> Tensor",
)  # fmt: skip
def _keep_mask(seed_step: Tensor, call: int, p: float, global_shape: Shape, local_shape: Shape, offsets: Shape) -> Tensor:
    tile = tile_of(global_shape, local_shape, offsets)
    mask = torch.empty(tuple(local_shape), dtype=torch.bool, device=seed_step.device)
    philox.draw("mask", tile, None, mask, seed_step, call, threshold=keep_threshold(1.0 - p))
    return mask


@operator(
    "dropout", results="x, x:bool", fit=_fit_dropout, gradient=_of_dropped,
    schema=f"(Tensor x, Tensor seed_step, int call, float p, {_TILE}) -> (Tensor out, Tensor mask)",
)  # fmt: skip
def _dropout(
    x: Tensor, seed_step: Tensor, call: int, p: float, global_shape: Shape, local_shape: Shape, offsets: Shape
) -> tuple[Tensor, Tensor]:
    tile = tile_of(global_shape, local_shape, offsets)
    x = x.contiguous()
    mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    threshold, scale = keep_threshold(1.0 - p), keep_scale(p)
    if x.dtype not in (torch.float32, torch.float64) and not x.is_cuda:
        _floating(x.dtype)
        philox.draw("mask", tile, None, mask, seed_step, call, threshold=threshold)
        return torch.where(mask, x * scale, 0.0), mask
    out = torch.empty(x.shape, dtype=_floating(x.dtype), device=x.device)
    philox.draw("dropout64" if x.dtype == torch.float64 else "dropout32", tile, out, mask, seed_step, call, x, threshold, scale)
    return out, mask


@operator(
    "dropout_backward", results="grad", fit="grad [..], mask:bool [..]", where=lambda grad, mask: grad.device == mask.device,
    rule="mask is bool and has the shape of grad", gradient=_of_dropped,
    schema="(Tensor grad, Tensor mask, float p) -> Tensor",
)  # fmt: skip
def _dropout_backward(grad: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = keep_scale(p)
    if grad.dtype not in (torch.float32, torch.float64) and not grad.is_cuda:
        return torch.where(mask, grad * scale, 0.0).contiguous()
    grad, mask = grad.contiguous(), mask.contiguous()
    out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    tile = tile_of((grad.numel(),), (grad.numel(),), (0,))
    philox.draw("backward64" if grad.dtype == torch.float64 else "backward32", tile, out, mask, x=grad, scale=scale)
    return out


def _floating(dtype: torch.dtype) -> torch.dtype:
    if dtype not in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        raise TypeError(f"meshc draws float16, bfloat16, float32 and float64, not {dtype}")
    return dtype


def _to_signed_int64(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# ------------------------------------------------------------------------------------------------------- whole tensors, in Python


def uniform(seed_step: Tensor, call: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws in [0, 1) for a whole tensor of `shape`, on seed_step's device."""
    return torch.ops.meshc.uniform(seed_step, call, shape, shape, [0] * len(shape), dtype)


def normal(seed_step: Tensor, call: int, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draws of mean 0 and variance 1 for a whole tensor of `shape`, on seed_step's device."""
    return torch.ops.meshc.normal(seed_step, call, shape, shape, [0] * len(shape), dtype)


def keep_mask(seed_step: Tensor, call: int, p: float, shape: Shape) -> Tensor:
    """The mask that `dropout` with this call and `p` uses for a whole tensor of `shape`."""
    return torch.ops.meshc.keep_mask(seed_step, call, p, shape, shape, [0] * len(shape))


def dropout(x: Tensor, seed_step: Tensor, call: int, p: float) -> Tensor:
    """where(mask, x / (1 - p), 0) for a whole tensor; p = 0 keeps all, p = 1 gives zeros."""
    return torch.ops.meshc.dropout(x, seed_step, call, p, x.shape, x.shape, [0] * x.dim())[0]


def bernoulli(seed_step: Tensor, call: int, probability: Tensor, tile: tuple[Shape, Shape, Shape] | None = None) -> Tensor:
    """One where a uniform draw keeps with `probability` (element by element), else zero, in probability's dtype and shape.

    tile  (global shape, local shape, offsets) of probability where it is a tile of what is drawn
    """
    tile = tile or (probability.shape, probability.shape, [0] * probability.dim())
    bits = torch.ops.meshc.uniform(seed_step, call, *tile, torch.float32).double() * 2.0**24
    return (bits >= 2.0**24 - (probability.double() * 2.0**24).round()).to(probability.dtype)


def dropout_without_draws(input: Tensor, p: float, training: bool) -> Tensor:
    """Dropout without draws, as in torch: not training, p = 0, or p = 1."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return input * input.new_zeros(()) if training and p == 1.0 else input
