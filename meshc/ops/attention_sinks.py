"""Attention with sinks: a further logit per query, without key or value, in the softmax's denominator.

    weights = softmax(cat(scale * q k^T + bias, sinks))[..., :-1]          out = weights v

    q [batch, heads, q, head]     k, v [batch, heads, k, head]     bias [batch|1, heads|1, q|1, k] or None     sinks [batch, heads, q, 1]

A sink is one more column of the scores, whose value is zero. Attention to the keys alone gives `out` and for each query the log-sum-exp
`lse`; with the sink they are `out * sigmoid(lse - sink)` and `logaddexp(lse, sink)`, and attention's backward, given these two, returns the
gradients of q, k and v of the whole. So ring attention works as without a sink (`attention.py`).
Sinks: Xiao et al., Efficient Streaming Language Models with Attention Sinks (arXiv:2309.17453); learned ones: gpt-oss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshc.ops.attention import attention, attention_backward


def sink_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    """`out` [batch, heads, q, head]. Cases without a kernel (a bias with a gradient, head sizes that differ) are decomposed."""
    fits = q.dim() == k.dim() == v.dim() == sinks.dim() == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1]
    fits = fits and q.shape[:2] == k.shape[:2] == v.shape[:2] and sinks.shape == (*q.shape[:3], 1)
    fits = fits and q.dtype == k.dtype == v.dtype and not (bias is not None and (bias.requires_grad or bias.dim() > 4))
    if not fits:
        scores = torch.matmul(q, k.transpose(-2, -1)) * scale
        combined = torch.cat([scores if bias is None else scores + bias, sinks], -1)
        return torch.matmul(torch.softmax(combined, -1)[..., :-1].to(v.dtype), v)
    if bias is not None:
        bias = bias.to(q.dtype).reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    made: Tensor = _Sinks.apply(q, k, v, bias, sinks, scale)
    return made


class _Sinks(torch.autograd.Function):
    """Forward and backward are traced operator by operator."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
        keys_alone, lse = attention(q, k, v, bias, False, scale)
        sink = sinks.squeeze(-1).to(lse.dtype)
        share = torch.sigmoid(lse - sink).unsqueeze(-1)
        out = (keys_alone.to(lse.dtype) * share).to(q.dtype)
        ctx.scale, ctx.dtype = scale, sinks.dtype
        ctx.save_for_backward(q, k, v, bias, sink, out, torch.logaddexp(lse, sink))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, bias, sink, out, lse = ctx.saved_tensors
        dq, dk, dv = attention_backward(grad, q, k, v, bias, out, lse, False, ctx.scale)
        taken = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dsinks = -(torch.exp(sink - lse) * taken).unsqueeze(-1)
        return dq, dk, dv, None, dsinks.to(ctx.dtype), None
