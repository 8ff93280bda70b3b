"""`meshc::upsample`: nearest-neighbour upsampling by whole factors; and `interpolate` in terms of it.

    upsample(x [batch, channels, space...], factors) -> [batch, channels, space * factor...]
    upsample_backward(grad, factors) -> the gradient of x: the sum over the copies
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshc.ops.definition import misfit, operator, ops


def _fit(operator: str, factors: Sequence[int], x: Tensor) -> None:
    fits = x.dim() == len(factors) + 2 and all(factor >= 1 for factor in factors)
    if not fits or operator == "upsample_backward" and any(size % factor for size, factor in zip(x.shape[2:], factors, strict=True)):
        raise misfit(operator, f"the factors {list(factors)} are 1 or more, one a dim of space, and divide what is added up", x=x)


@operator(
    "upsample",
    results=lambda x, factors: x.new_empty((*x.shape[:2], *(size * factor for size, factor in zip(x.shape[2:], factors, strict=True)))),
    fit=_fit,
    gradient=lambda grad, factors: ops.upsample_backward(grad, factors),
)
def upsample(x: Tensor, factors: Sequence[int]) -> Tensor:
    for dim, factor in enumerate(factors, 2):
        x = x.repeat_interleave(factor, dim)
    return x.clone() if all(factor == 1 for factor in factors) else x


@operator(
    "upsample_backward",
    results=lambda grad, factors: grad.new_empty(
        (*grad.shape[:2], *(size // factor for size, factor in zip(grad.shape[2:], factors, strict=True)))
    ),
    fit=lambda operator, factors, grad: _fit(operator, factors, grad),
)
def upsample_backward(grad: Tensor, factors: Sequence[int]) -> Tensor:
    shape = list(grad.shape[:2])
    for size, factor in zip(grad.shape[2:], factors, strict=True):
        shape += [size // factor, factor]
    return grad.reshape(shape).sum(list(range(3, len(shape), 2)))


def interpolate(
    input: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """As `torch.nn.functional.interpolate`: `upsample` for nearest by whole factors, torch's own for all else."""
    factors = _whole_factors(input, size, scale_factor) if mode in ("nearest", "nearest-exact") and input.is_floating_point() else None
    if factors is None or align_corners is not None or antialias:
        return torch.nn.functional.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
    return upsample(input, factors)


def _whole_factors(input: Tensor, size: int | Sequence[int] | None, scale_factor: float | Sequence[float] | None) -> list[int] | None:
    space = input.shape[2:]
    if (size is None) == (scale_factor is None) or not space:
        return None
    wanted = size if size is not None else scale_factor
    assert wanted is not None
    each = list(wanted) if isinstance(wanted, Sequence) else [wanted] * len(space)
    if len(each) != len(space):
        return None
    ratios = each if size is None else [extent / now for extent, now in zip(each, space, strict=True)]
    factors = [int(ratio) for ratio in ratios]
    return factors if all(factor >= 1 and factor == ratio for factor, ratio in zip(factors, ratios, strict=True)) else None
