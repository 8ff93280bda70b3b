"""`meshc::attention_join`: merge by log-sum-exp of attention over parts of the keys, each computed by the rank that has the part.

    parts  [parts, batch, heads, q, head + 1]: for each part of the keys its output, followed by its log-sum-exp, in float32 or float64
    out  [batch, heads, q, head], lse  [batch, heads, q]: of attention over all keys

Each part is weighted by its sum of exponentials. A query that sees no key of any part has out 0 and lse minus infinity.
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
