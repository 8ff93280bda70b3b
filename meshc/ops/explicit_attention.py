"""Attention by its weights, for what the kernels of `attention` do not know: weights that are dropped, and the gradient of the bias.

    weights = softmax(scale * q k^T + bias)         of the keys that a query sees
    out = (weights where they are kept, / (1 - p)) v                    lse = log(sum(exp(scale * q k^T + bias)))

Shapes are those of `attention.py`; gradients are like their operands.

Weights are computed for one block of queries at a time, and recomputed in backward. The dropout mask is a function of (seed, step, call,
index among all weights) as all draws are; `global_shape`, `local_shape` and `offsets` are those of [batch, heads, q, k], every factor a
dim. So blocks of the keys drop the same weights as the whole, and are merged by `attention_merge`: `lse` is that of all weights before
dropout. A query that sees nothing has out 0 and lse minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshc.ops import attention_masked_blocks
from meshc.ops.random import keep_scale

AT_ONCE = 1 << 20
"""Weights that are held at a time, unless those of 16 queries are more."""

Draws = tuple[Tensor | None, int, float, Sequence[int] | None, Sequence[int] | None, Sequence[int] | None]
"""(seed_step, call, p, global_shape, local_shape, offsets); nothing is dropped without a seed_step."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, sees: CausalWindow, draws: Draws, out: Tensor, lse: Tensor
) -> None:
    """Fills `out` and `lse`."""
    drops = _WeightDropout.of(draws, q, k)
    for rows, keys in sees.blocks(q.shape[0] * q.shape[1], bias):
        asked, made, sums = q[:, :, rows], out[:, :, rows], lse[:, :, rows]
        if keys.stop == keys.start:
            made.zero_(), sums.fill_(-math.inf)
            continue
        scores = sees.mask_scores(_scores(asked, k[:, :, keys], bias if bias is None else _part(bias, rows, keys), scale), rows, keys)
        top = scores.amax(-1, keepdim=True)
        top = torch.where(top == -math.inf, 0.0, top)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        weights = drops.apply_dropout(weights, rows, keys)
        mixed = torch.matmul(weights.to(v.dtype), v[:, :, keys]).to(total.dtype)
        made.copy_(mixed / torch.where(total == 0, 1.0, total))
        sums.copy_((total.log() + top).squeeze(-1))


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Scores in the dtype in which weights are accumulated."""
    scores = torch.matmul(q, k.transpose(2, 3))
    scores = scores if scores.dtype == torch.float64 else scores.float()
    scores = scores if scale == 1.0 else scores * scale
    return scores if bias is None else scores + bias.to(scores.dtype)


def _part(bias: Tensor, rows: slice, keys: slice) -> Tensor:
    """The part of `bias` for `rows` and `keys`."""
    return bias[:, :, rows if bias.shape[2] != 1 else slice(0, 1), keys if bias.shape[3] != 1 else slice(0, 1)]


@dataclass(frozen=True)
class CausalWindow:
    """Visibility of `real` keys to `queries`; with `causal` the first query has the position of key `at`, and sees the keys up to it."""

    queries: int
    real: int
    causal: bool
    window: int
    at: int

    def blocks(self, heads: int, bias: Tensor | None) -> Iterator[tuple[slice, slice]]:
        """(rows of queries, range of keys that any of them sees), in order. On a CPU the range also excludes keys that a bias masks
        (`attention_masked_blocks.py`)."""
        looked_up = bias if bias is not None and not bias.is_cuda and bias.shape[3] > 1 else None
        step = max(16, AT_ONCE // max(1, heads * self.real))
        for begin in range(0, self.queries, step):
            rows = slice(begin, min(begin + step, self.queries))
            first, end = 0, self.real
            if self.causal:
                end = max(0, min(self.real, self.at + rows.stop))
                first = min(end, max(0, self.at + rows.start - self.window + 1)) if self.window else 0
            keys = slice(first, end)
            yield (
                rows,
                keys
                if looked_up is None or first == end
                else attention_masked_blocks.narrow_to_visible_keys(_part(looked_up, rows, keys), keys),
            )

    def mask_scores(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """`scores`, set in place to minus infinity where a query does not see a key."""
        if not self.causal or keys.stop <= self.at + rows.start + 1 and not self.window:
            return scores
        at = torch.arange(self.at + rows.start, self.at + rows.stop, device=scores.device).unsqueeze(1)
        keys_at = torch.arange(keys.start, keys.stop, device=scores.device)
        hidden = keys_at > at if not self.window else (keys_at > at) | (keys_at <= at - self.window)
        return scores.masked_fill_(hidden, -math.inf)


@dataclass(frozen=True)
class _WeightDropout:
    """Dropout mask of the weights [batch, heads, q, k]: drawn in parts if each is one dim of the draw, else all at once."""

    seed_step: Tensor | None
    call: int
    p: float
    global_shape: Sequence[int] | None
    offsets: Sequence[int] | None
    shape: Sequence[int]
    whole: Tensor | None

    @staticmethod
    def of(draws: Draws, q: Tensor, k: Tensor) -> _WeightDropout:
        seed_step, call, p, global_shape, local_shape, offsets = draws
        shape = [*q.shape[:3], k.shape[2]]
        whole = None
        if seed_step is not None and list(local_shape or ()) != shape:
            whole = torch.ops.meshc.keep_mask(seed_step, call, p, global_shape, local_shape, offsets).reshape(shape)
        return _WeightDropout(seed_step, call, p, global_shape, offsets, shape, whole)

    def apply_dropout(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """Apply dropout to `x`, the weights of `rows` and `keys`, in place: kept ones times 1 / (1 - p), others zero."""
        return x if self.seed_step is None else x.mul_(keep_scale(self.p)).masked_fill_(~self._tile_keep_mask(rows, keys), 0.0)

    def _tile_keep_mask(self, rows: slice, keys: slice) -> Tensor:
        if self.whole is not None:
            return self.whole[:, :, rows, keys]
        part = [*self.shape[:2], rows.stop - rows.start, keys.stop - keys.start]
        batch, head, query, key = self.offsets or ()
        at = [batch, head, query + rows.start, key + keys.start]
        kept: Tensor = torch.ops.meshc.keep_mask(self.seed_step, self.call, self.p, self.global_shape, part, at)
        return kept


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, scale: float, sees: CausalWindow,
    draws: Draws, zeros: Callable[[Tensor], Tensor], dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, which `zeros` allocates; that of the bias is added to `dbias`."""
    drops = _WeightDropout.of(draws, q, k)
    dq, dk, dv = zeros(q), zeros(k).to(lse.dtype), zeros(v).to(lse.dtype)
    lse = torch.where(lse == -math.inf, math.inf, lse)  # a query that sees no key: all of its weights are 0
    apart = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1, keepdim=True)
    for rows, keys in sees.blocks(q.shape[0] * q.shape[1], bias):
        if keys.stop == keys.start:
            continue
        asked, here, values, given = q[:, :, rows], k[:, :, keys], v[:, :, keys], grad[:, :, rows]
        scores = sees.mask_scores(_scores(asked, here, bias if bias is None else _part(bias, rows, keys), scale), rows, keys)
        weights = scores.sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
        kept = drops.apply_dropout(weights.clone(), rows, keys) if drops.seed_step is not None else weights
        dv[:, :, keys] += torch.matmul(kept.to(v.dtype).transpose(2, 3), given)
        dscores = drops.apply_dropout(torch.matmul(given, values.transpose(2, 3)).to(lse.dtype), rows, keys)
        dscores = dscores.sub_(apart[:, :, rows]).mul_(weights)
        if dbias is not None:
            part = _part(dbias, rows, keys)
            part += dscores.sum_to_size(part.shape)
        dscores = (dscores if scale == 1.0 else dscores.mul_(scale)).to(q.dtype)
        dq[:, :, rows] = torch.matmul(dscores, here)
        dk[:, :, keys] += torch.matmul(dscores.transpose(2, 3), asked)
    return dq, dk.to(k.dtype), dv.to(v.dtype)
