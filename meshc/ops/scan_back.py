"""`meshc::cumsum_back` and `logcumsumexp_back`: scans from a dim's end, for the gradients of `cumsum` and `logcumsumexp`.

    cumsum_back(x, dim)          y[t] = sum of x[j] over j >= t
    logcumsumexp_back(x, dim)    y[t] = log of the sum of exp(x[j]) over j >= t
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.operands import misfit


@torch.library.custom_op("meshc::cumsum_back", mutates_args=())
def cumsum_back(x: Tensor, dim: int) -> Tensor:
    _fit("cumsum_back", x, dim)
    return x.flip(dim).cumsum(dim).flip(dim)


@cumsum_back.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    _fit("cumsum_back", x, dim)
    return x.new_empty(x.shape)


@torch.library.custom_op("meshc::logcumsumexp_back", mutates_args=())
def logcumsumexp_back(x: Tensor, dim: int) -> Tensor:
    _fit("logcumsumexp_back", x, dim)
    return x.flip(dim).logcumsumexp(dim).flip(dim)


@logcumsumexp_back.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    _fit("logcumsumexp_back", x, dim)
    return x.new_empty(x.shape)


def _fit(operator: str, x: Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim() or not x.is_floating_point():
        raise misfit(operator, f"x is of a floating dtype, and {dim} one of its dims", x=x)
