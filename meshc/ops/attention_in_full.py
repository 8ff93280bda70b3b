"""Unfused attention over all scores, forward and backward, for dtypes without a kernel (float64 on CUDA) and for double backward.

    scores = scale * q k^T + bias, minus infinity where `causal` hides a key       lse = log(sum(exp(scores)))       out = softmax(scores) v

Shapes are those of `attention.py`. A query that sees no key has out 0 and lse minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def _weights(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if lse is None:  # queries that see no key are excluded, or the gradient of their sums would be NaN
        blind = scores.detach().amax(-1, keepdim=True) == -math.inf
        sums = torch.where(blind, 0.0, scores).logsumexp(-1)
        return (scores - sums.unsqueeze(-1)).exp(), torch.where(blind.squeeze(-1), -math.inf, sums)
    top = torch.where(lse == -math.inf, 0.0, lse)
    return (scores - top.unsqueeze(-1)).exp(), lse


def in_full(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, kept: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`(out, lse)`; `out` is in memory order queries, then heads. `kept`: applies dropout to the weights."""
    weights, lse = _weights(_wide(q), _wide(k), bias, causal, scale)
    weights = weights if kept is None else kept(weights)
    return to_kernel_layout(torch.matmul(weights, _wide(v)).to(q.dtype)), lse.contiguous()


def in_full_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    weights, _ = _weights(q, k, bias, causal, scale, lse)
    of_scores = weights * (torch.matmul(grad, v.transpose(2, 3)) - (grad * out).sum(-1, keepdim=True)) * scale
    dq, dk, dv = torch.matmul(of_scores, k), torch.matmul(of_scores.transpose(2, 3), q), torch.matmul(weights.transpose(2, 3), grad)
    return to_kernel_layout(dq), to_kernel_layout(dk), to_kernel_layout(dv)


def _wide(x: Tensor) -> Tensor:
    """`x` in the dtype in which kernels accumulate."""
    return x if x.dtype == torch.float64 else x.float()


def to_kernel_layout(x: Tensor) -> Tensor:
    """`x` in memory order queries, then heads, as the kernels return results; copied unless it is so already."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
