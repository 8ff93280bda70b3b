"""`meshc::cumsum_back` and `logcumsumexp_back`: scans from a dim's end, for the gradients of `cumsum` and `logcumsumexp`.

    cumsum_back(x, dim)          y[t] = sum of x[j] over j >= t
    logcumsumexp_back(x, dim)    y[t] = log of the sum of exp(x[j]) over j >= t
"""

from __future__ import annotations

from torch import Tensor

from meshc.ops.definition import misfit, operator


def _fit(x: Tensor, dim: int) -> None:
    if not 0 <= dim < x.dim() or not x.is_floating_point():
        raise misfit("cumsum_back, logcumsumexp_back", f"x is of a floating dtype, and {dim} one of its dims", x=x)


@operator("cumsum_back", results="x", fit=_fit)
def cumsum_back(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


@operator("logcumsumexp_back", results="x", fit=_fit)
def logcumsumexp_back(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).logcumsumexp(dim).flip(dim)
