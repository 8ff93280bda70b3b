"""Distributions as functions of meshc's uniform draws u and normal draws z.

    exponential  -log(1 - u) / rate                   cauchy       median + sigma * tan(pi * (u - 1/2))
    geometric    floor(log(1 - u) / log(1 - p)) + 1   log_normal   exp(mean + std * z)
    integers     low + floor(u * (high - low))        permutation  the order that sorts u
    multinomial  the largest of weight / exponential; with replacement, where u meets the running sum of the weights

Draws are bit-equal on all meshes; what is computed of them by `log` or `tan` is equal up to the rounding of these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshc.ops import random as _random  # noqa: F401 - registers the draws

Shape = Sequence[int]
EXACT = 1 << 53
"""Number of integers that a uniform draw distinguishes."""


@dataclass(frozen=True)
class Draws:
    """One numbered random call: a tile (global shape, local shape, offsets) of what it draws."""

    seed_step: Tensor
    call: int
    tile: tuple[Shape, Shape, Shape]

    @classmethod
    def of(cls, seed_step: Tensor, call: int, shape: Shape) -> Draws:
        """The draws for a whole tensor."""
        return cls(seed_step, call, (list(shape), list(shape), [0] * len(shape)))

    @property
    def shape(self) -> Shape:
        return self.tile[1]

    def uniform(self, dtype: torch.dtype) -> Tensor:
        return torch.ops.meshc.uniform(self.seed_step, self.call, *self.tile, dtype)

    def normal(self, dtype: torch.dtype) -> Tensor:
        return torch.ops.meshc.normal(self.seed_step, self.call, *self.tile, dtype)


def uniform(draws: Draws, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """In [low, high)."""
    values = draws.uniform(dtype)
    return values if (low, high) == (0.0, 1.0) else values * (high - low) + low


def normal(draws: Draws, mean: Tensor | float, std: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`mean` and `std` are numbers, or tensors that broadcast to the shape of the draws."""
    values = draws.normal(dtype)
    standard = not isinstance(mean, Tensor) and not isinstance(std, Tensor) and (mean, std) == (0.0, 1.0)
    return values if standard else values * std + mean


def exponential(draws: Draws, rate: float, dtype: torch.dtype) -> Tensor:
    """Above zero, as in torch: a draw of zero counts as half the smallest distance from 1."""
    wide = _wide(dtype)
    values = -torch.log1p(-draws.uniform(wide))
    return (values.clamp(min=torch.finfo(wide).eps / 4) / rate).to(dtype)


def log_normal(draws: Draws, mean: float, std: float, dtype: torch.dtype) -> Tensor:
    return torch.exp(normal(draws, mean, std, _wide(dtype))).to(dtype)


def cauchy(draws: Draws, median: float, sigma: float, dtype: torch.dtype) -> Tensor:
    values = draws.uniform(_wide(dtype))
    return (torch.tan((values - 0.5) * math.pi) * sigma + median).to(dtype)


def geometric(draws: Draws, p: float, dtype: torch.dtype) -> Tensor:
    """Trials up to the first success, 1 at least."""
    if not 0.0 < p < 1.0:
        raise ValueError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    return (torch.floor(torch.log1p(-draws.uniform(torch.float64)) / math.log1p(-p)) + 1.0).to(dtype)


def integers(draws: Draws, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """In [low, high), which holds 2^53 integers at most."""
    if not 0 < high - low <= EXACT:
        raise ValueError(f"random integers in [{low}, {high}): meshc draws from a range of 1 to 2^53 integers")
    found = torch.floor(draws.uniform(torch.float64) * float(high - low)).clamp(max=float(high - low - 1)).to(torch.int64)
    return (found + low if low else found).to(dtype)


def permutation(draws: Draws, dtype: torch.dtype) -> Tensor:
    """A permutation of range(n), by n draws."""
    return torch.sort(draws.uniform(torch.float64), dim=0, stable=True)[1].to(dtype)


def multinomial(draws: Draws, weights: Tensor, samples: int, replacement: bool) -> Tensor:
    """int64 [..., samples], indices into the last dim of `weights` [..., n]. Draws [..., samples] with replacement, [..., n] without."""
    weights = weights.detach().double()
    if not replacement:
        waiting = exponential(draws, 1.0, torch.float64)
        return torch.topk(weights / waiting, samples, -1)[1]
    reached = torch.cumsum(weights, -1)
    at = draws.uniform(torch.float64) * reached[..., -1:]
    found = (reached.unsqueeze(-2) <= at.unsqueeze(-1)).sum(-1)
    return found.clamp(max=weights.shape[-1] - 1)


def multinomial_shape(weights: Shape, samples: int, replacement: bool) -> list[int]:
    """Shape of the draws of `multinomial`."""
    return [*weights[:-1], samples] if replacement else list(weights)


def rrelu_slopes(draws: Draws, x: Tensor, lower: float, upper: float) -> Tensor:
    """Factor for each element of `x`: 1 above zero, else in [lower, upper)."""
    return torch.where(x.detach() > 0, 1.0, uniform(draws, lower, upper, x.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
