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


@operator(
    "attention_join",
    results=lambda parts: (parts.new_empty((*parts.shape[1:-1], parts.shape[-1] - 1)), parts.new_empty(parts.shape[1:-1])),
    fit="parts:float [count, batch, heads, queries, width], count >= 1, width >= 2",
    rule="parts are [parts, batch, heads, queries, head + 1], one at least, in float32 or float64",
)
def attention_join(parts: Tensor) -> tuple[Tensor, Tensor]:
    made, sums = parts[..., :-1], parts[..., -1]
    top = sums.amax(0)
    top = torch.where(top == -math.inf, 0.0, top)
    shares = (sums - top).exp_()
    total = shares.sum(0)
    out = (made * shares.unsqueeze(-1)).sum(0) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    return out, total.log() + top


@operator(
    "attention_merge",
    results=lambda out, lse, more, more_lse: (
        torch.lerp(more.to(lse.dtype), out.to(lse.dtype), lse.unsqueeze(-1)), torch.logaddexp(lse, more_lse),
    ),
    fit="out [batch, heads, q, head], lse:float [batch, heads, q], more [batch, heads, q, head], more_lse:lse [batch, heads, q]",
    rule="both are [batch, heads, queries, head], with a sum of exponentials in float32 or float64 for each query",
)  # fmt: skip
def attention_merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    apart = torch.where(lse == more_lse, 0, lse - more_lse)  # minus infinities too
    joined = torch.lerp(more.to(lse.dtype), out.to(lse.dtype), torch.sigmoid(apart).unsqueeze(-1))
    return joined, torch.logaddexp(lse, more_lse)
