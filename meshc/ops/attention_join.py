"""Merges by log-sum-exp of attention over blocks of the keys: of two results, and of one from each rank.

    out, lse = attention_merge(out, lse, more, more_lse)     of two blocks; in float32 where q has fewer bits, so that it is rounded once
    out, lse = attention_join(parts)                         of all: [parts, batch, heads, q, head + 1], each output with its log-sum-exp
    out  [batch, heads, q, head], lse  [batch, heads, q]     equal to attention over all these keys at once

Each part is weighted by its sum of exponentials. A query that sees no key of any part has out 0 and lse minus infinity. Liu, Zaharia,
Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context (arXiv:2310.01889).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshc.ops.definition import operator
from meshc.ops.operands import misfit


def _fit(parts: Tensor) -> None:
    if parts.dim() != 5 or not parts.shape[0] or parts.shape[-1] < 2 or parts.dtype not in (torch.float32, torch.float64):
        rule = "parts are [parts, batch, heads, queries, head + 1], one at least, in float32 or float64"
        raise misfit("attention_join", rule, parts=parts)


@operator(
    "attention_join",
    results=lambda parts: (parts.new_empty((*parts.shape[1:-1], parts.shape[-1] - 1)), parts.new_empty(parts.shape[1:-1])),
    fit=_fit,
)
def attention_join(parts: Tensor) -> tuple[Tensor, Tensor]:
    made, sums = parts[..., :-1], parts[..., -1]
    top = sums.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    shares = (sums - top).exp_()
    total = shares.sum(0)
    out = (made * shares.unsqueeze(-1)).sum(0) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, total.log() + top


def _fit_merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    fits = out.dim() == 4 and out.shape == more.shape and lse.shape == more_lse.shape == out.shape[:3]
    if not fits or lse.dtype != more_lse.dtype or lse.dtype not in (torch.float32, torch.float64):
        rule = "both are [batch, heads, queries, head], with a sum of exponentials in float32 or float64 for each query"
        raise misfit("attention_merge", rule, out=out, lse=lse, more=more, more_lse=more_lse)


@operator(
    "attention_merge",
    results=lambda out, lse, more, more_lse: (
        torch.lerp(more.to(lse.dtype), out.to(lse.dtype), lse.unsqueeze(-1)), torch.logaddexp(lse, more_lse),
    ),
    fit=_fit_merge,
)
def attention_merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    apart = torch.where(lse == more_lse, 0, lse - more_lse)  # minus infinities too
    joined = torch.lerp(more.to(lse.dtype), out.to(lse.dtype), torch.sigmoid(apart).unsqueeze(-1))
    return joined, torch.logaddexp(lse, more_lse)
