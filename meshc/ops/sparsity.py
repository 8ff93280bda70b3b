"""Operators of sparse weights: the largest of each group, which these are, and gradients that draw the others towards zero.

    kept = meshc.keep_largest(w [.., m, ..], 2, 1)                       of each m entries along dim 1 the 2 largest; zero for the others
    grad = meshc.refine_gradient(grad, w [.., m, ..], 2, 1, 2e-4)        grad + 2e-4 * (w - kept)
    mask = meshc.is_largest(w [.., m, ..], 2, 1)                         which are kept
    mask = meshc.next_mask(w [.., m, ..], mask, steps [1], 2, 1, 10, -1)  made anew every 10 steps, as it was between
    kept = meshc.keep_masked(w [.., m, ..], mask, steps [1], 2, 1, 10, -1)  w where that mask is true; zero elsewhere

Of entries of one magnitude the first are kept. NaN is kept, beside the others, so that it is not lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import misfit, operator


def _check_group(x: Tensor, n: int, dim: int) -> None:
    if not (x.is_floating_point() and 0 <= dim < x.dim() and 0 < n <= x.shape[dim]):
        raise misfit("keep_largest", f"{n} of the entries along dim {dim} are kept, of floating-point values", x=x)


def is_among_largest(x: Tensor, n: int, dim: int) -> Tensor:
    """Of x's shape: whether fewer than n entries along the dim are larger in magnitude, or as large and before it."""
    size = x.abs()
    ahead = torch.zeros(x.shape, dtype=torch.int8, device=x.device)
    for place in range(x.shape[dim]):
        one = size.narrow(dim, place, 1)
        ahead += one > size
        ahead.narrow(dim, place + 1, x.shape[dim] - place - 1).add_(one == size.narrow(dim, place + 1, x.shape[dim] - place - 1))
    return ahead < n


@operator("keep_largest", "x", _check_group)
def keep_largest(x: Tensor, n: int, dim: int) -> Tensor:
    """Of x's shape: the n entries of largest magnitude along the dim, zeros in the place of the others."""
    return torch.where(is_among_largest(x, n, dim), x, 0.0)


def _check_refined(gradient: Tensor, x: Tensor, n: int, dim: int) -> None:
    _check_group(x, n, dim)
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        raise misfit("refine_gradient", "a gradient has the shape and the dtype of its weight", gradient=gradient, x=x)


@operator("refine_gradient", "gradient", _check_refined)
def refine_gradient(gradient: Tensor, x: Tensor, n: int, dim: int, decay: float) -> Tensor:
    """Of x's shape: the gradient, plus `decay` times each entry of x that `keep_largest` does not keep."""
    return gradient + decay * torch.where(is_among_largest(x, n, dim), 0.0, x)


@operator("is_largest", lambda x: torch.empty(x.shape, dtype=torch.bool, device=x.device), _check_group)
def is_largest(x: Tensor, n: int, dim: int) -> Tensor:
    """bool of x's shape: whether `keep_largest` keeps an entry."""
    return is_among_largest(x, n, dim)


def _check_mask(x: Tensor, mask: Tensor, steps: Tensor, n: int, dim: int, every: int) -> None:
    _check_group(x, n, dim)
    if mask.dtype != torch.bool or mask.shape != x.shape or steps.dtype != torch.int64 or steps.shape != (1,) or every < 1:
        raise misfit("next_mask", "a mask is bool, of its weight's shape, the number of steps int64 [1], a period 1 at least", mask=mask)


@operator("next_mask", lambda x: torch.empty(x.shape, dtype=torch.bool, device=x.device), _check_mask)
def next_mask(x: Tensor, mask: Tensor, steps: Tensor, n: int, dim: int, every: int, until: int) -> Tensor:
    """bool of x's shape: which entries are largest, after a number of steps that `every` divides, up to `until` (-1: always) and in groups
    that have no mask; else the mask."""
    due = steps % every == 0
    if until >= 0:
        due = due & (steps <= until)
    anew = due.reshape([1] * x.dim()) | ~mask.any(dim, keepdim=True)
    return torch.where(anew, is_among_largest(x, n, dim), mask)


@operator("keep_masked", "x", _check_mask)
def keep_masked(x: Tensor, mask: Tensor, steps: Tensor, n: int, dim: int, every: int, until: int) -> Tensor:
    """Of x's shape: x where `next_mask` is true, zero elsewhere."""
    return torch.where(next_mask(x, mask, steps, n, dim, every, until), x, 0.0)
