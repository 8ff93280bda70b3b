"""Torch's `scaled_dot_product_attention`, and attention that a model writes out, in operators that meshc knows.

    attention                   with dropout and a mask too
    matmul, softmax, matmul     where heads differ in size or broadcast, or operands are not [batch, heads, positions, head]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshc.ops.attention import attention
from meshc.ops.attention_sinks import sink_attention
from meshc.ops.random import dropout, dropout_without_draws


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed_step: Tensor | None = None,
    call: int = 0,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, in operators that meshc knows."""
    q, k, v = query, key, value
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if enable_gqa and q.shape[-3] != k.shape[-3]:
        repeat = q.shape[-3] // k.shape[-3]
        k = k.unsqueeze(-3).expand(*k.shape[:-2], repeat, *k.shape[-2:]).flatten(-4, -3)
        v = v.unsqueeze(-3).expand(*v.shape[:-2], repeat, *v.shape[-2:]).flatten(-4, -3)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        bias = torch.where(bias, zero, torch.full((), -math.inf, dtype=q.dtype, device=q.device))
    fits = q.dim() == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[:2] == k.shape[:2] == v.shape[:2]
    if fits and (dropout_p == 0.0 or 0.0 < dropout_p < 1.0 and seed_step is not None):
        if bias is not None:
            bias = bias.to(q.dtype)
            bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        causal = is_causal and bias is None
        if dropout_p == 0.0:
            return attention(q, k, v, bias, causal, scale)[0]
        drawn = [*q.shape[:3], k.shape[2]]
        return attention(q, k, v, bias, causal, scale, 0, 0, 0, 0, None, seed_step, call, dropout_p, drawn, drawn, [0] * 4)[0]
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    if is_causal:
        rows = torch.arange(q.shape[-2], device=q.device).unsqueeze(-1)
        columns = torch.arange(k.shape[-2], device=q.device)
        scores = torch.where(columns <= rows, scores, torch.full((), -math.inf, dtype=q.dtype, device=q.device))
    weights = torch.softmax(scores, -1) if bias is None else safe_softmax(scores + bias)
    if not 0.0 < dropout_p < 1.0:
        return torch.matmul(dropout_without_draws(weights, dropout_p, True), v)
    if seed_step is None:
        raise ValueError("attention with dropout needs seed_step")
    return torch.matmul(dropout(weights, seed_step, call, dropout_p), v)


def safe_softmax(scores: Tensor) -> Tensor:
    """Softmax that gives zeros, as in torch, for a fully masked query; its scores are replaced too, or its gradient would be NaN."""
    blind = scores.detach().amax(-1, keepdim=True) == -math.inf
    zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
    return torch.where(blind, zero, torch.softmax(torch.where(blind, zero, scores), -1))


def written_out_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    biases: Sequence[Tensor],
    hidden: Sequence[tuple[Tensor, float]],
    scale: float,
    dtype: torch.dtype,
    sinks: Tensor | None = None,
    *,
    p: float = 0.0,
    seed_step: Tensor | None = None,
    call: int = 0,
) -> Tensor:
    """Attention that a model writes out: scores [batch, heads, q, k] plus `biases`, and each number of `hidden` where its mask is true;
    weights in `dtype`, with dropout probability `p`, or beside `sinks` (`attention_sinks.py`), without dropout.

    Cases that attention's operators do not cover are decomposed again. These operators give zeros for a query whose keys are all masked by
    minus infinity, where a plain softmax would be NaN.
    """
    fits = q.shape[:2] == k.shape[:2] == v.shape[:2] and q.shape[-1] == k.shape[-1] == v.shape[-1] and 0.0 <= p < 1.0
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    added = [*biases, *(torch.where(where, torch.full_like(zero, number), zero) for where, number in hidden)]
    bias = sum(added[1:], added[0]) if added else None
    if sinks is not None:
        return sink_attention(q, k, v, bias, sinks, scale)
    if fits:
        return sdpa(q, k, v, bias, p, scale=scale, seed_step=seed_step, call=call)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    weights = torch.softmax(sum(added, scores), -1, dtype).to(v.dtype)
    if seed_step is None:
        return torch.matmul(weights, v)
    return torch.matmul(dropout(weights, seed_step, call, p), v)
