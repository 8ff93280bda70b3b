"""`meshc::explicit_attention`: attention that drops weights, or whose bias has a gradient; the kernels of `attention` know neither.

    weights = softmax(scale * q k^T + bias)         of keys  first, first + 1, ...  of all keys, of which `real` are not padding
    out = (weights where they are kept, / (1 - p)) v                    lse = log(sum(exp(scale * q k^T + bias)))

    q  [batch, heads, q, head]      k, v  [batch, heads, k, head]      bias  [batch|1, heads|1, q|1, k|1] or None
    out  like q      lse  [batch, heads, q]      gradients like their operands

Weights are computed for one block of queries at a time, and recomputed in backward. The dropout mask is a function of (seed, step, call,
index among all weights) as all draws are; `global_shape`, `local_shape` and `offsets` are those of [batch, heads, q, k], every factor a
dim, and empty without `seed_step`, when nothing is dropped. So blocks of the keys drop the same weights as the whole, and are merged by
`attention_merge`: `lse` is that of all weights before dropout. Backward takes `out` and `lse` of all blocks
together. Of masks `causal`, `window`, `offset`, `start`, `first` and `real` mean what they mean in `attention.py`; a query that sees
nothing has out 0 and lse minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshc.ops import attention_masked_blocks, double_backward
from meshc.ops.attention import _check, _empty, _fit, _fit_backward, _like
from meshc.ops.attention_in_full import in_full
from meshc.ops.definition import operator
from meshc.ops.operands import misfit
from meshc.ops.random import dropout, keep_scale

AT_ONCE = 1 << 20
"""Weights that are held at a time, unless those of 16 queries are more."""


def _fit_operands(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed_step: Tensor | None, call: int, p: float, global_shape: Sequence[int],
    local_shape: Sequence[int], *_: object,
) -> None:  # fmt: skip
    _fit("explicit_attention", q, k, v, bias)
    _fit_draws(q, k, seed_step, local_shape)


@operator("explicit_attention", results=lambda q, k, v, *_: _empty(q, v), fit=_fit_operands)
def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed_step: Tensor | None, call: int, p: float, global_shape: Sequence[int],
    local_shape: Sequence[int], offsets: Sequence[int], causal: bool, scale: float, window: int = 0, offset: int = 0, start: int = 0,
    first: int = 0, real: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    real = k.shape[2] if real is None else real
    _check(k, bias, causal, window, offset, real)
    drops = _WeightDropout.of((seed_step, call, p, global_shape, local_shape, offsets), q, k)
    sees = _CausalWindow(q.shape[2], real, causal, window, start + offset - first)
    out, lse = _empty(q, v)
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
    return out, lse


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
class _CausalWindow:
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
    global_shape: Sequence[int]
    offsets: Sequence[int]
    shape: Sequence[int]
    whole: Tensor | None

    @staticmethod
    def of(draws: tuple[Any, ...], q: Tensor, k: Tensor) -> _WeightDropout:
        """`draws`: the arguments from `seed_step` on."""
        seed_step, call, p, global_shape, local_shape, offsets = draws
        shape = [*q.shape[:3], k.shape[2]]
        whole = None
        if seed_step is not None and list(local_shape) != shape:
            whole = torch.ops.meshc.keep_mask(seed_step, call, p, global_shape, local_shape, offsets).reshape(shape)
        return _WeightDropout(seed_step, call, p, global_shape, offsets, shape, whole)

    def apply_dropout(self, x: Tensor, rows: slice, keys: slice) -> Tensor:
        """Apply dropout to `x`, the weights of `rows` and `keys`, in place: kept ones times 1 / (1 - p), others zero."""
        return x if self.seed_step is None else x.mul_(keep_scale(self.p)).masked_fill_(~self._tile_keep_mask(rows, keys), 0.0)

    def _tile_keep_mask(self, rows: slice, keys: slice) -> Tensor:
        if self.whole is not None:
            return self.whole[:, :, rows, keys]
        part = [*self.shape[:2], rows.stop - rows.start, keys.stop - keys.start]
        batch, head, query, key = self.offsets
        at = [batch, head, query + rows.start, key + keys.start]
        kept: Tensor = torch.ops.meshc.keep_mask(self.seed_step, self.call, self.p, self.global_shape, part, at)
        return kept


def _fit_draws(q: Tensor, k: Tensor, seed_step: Tensor | None, local_shape: Sequence[int]) -> None:
    if seed_step is None and not local_shape:
        return
    fits = seed_step is not None and math.prod(local_shape) == q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if not fits:
        rule = f"the local shape {list(local_shape)} holds a draw for each weight, and there is a seed_step; or there is neither"
        raise misfit("explicit_attention", rule, q=q, k=k, seed_step=seed_step)


@explicit_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seed_step: Tensor | None, call: int, p: float, global_shape: Sequence[int],
    local_shape: Sequence[int], *how: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _fit("explicit_attention", q, k, v, bias)
    _fit_draws(q, k, seed_step, local_shape)
    return _empty(q, v)


def _fit_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed_step: Tensor | None, call: int,
    p: float, global_shape: Sequence[int], local_shape: Sequence[int], *_: object,
) -> None:  # fmt: skip
    _fit_backward(grad, q, k, v, bias, out, lse)
    _fit_draws(q, k, seed_step, local_shape)


@operator("explicit_attention_backward", results=lambda grad, q, k, v, *_: (_like(q), _like(k), _like(v)), fit=_fit_gradients)
def explicit_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, seed_step: Tensor | None, call: int,
    p: float, global_shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int], causal: bool, scale: float, window: int = 0,
    offset: int = 0, start: int = 0, first: int = 0, real: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    draws = (seed_step, call, p, global_shape, local_shape, offsets)
    return _gradients(grad, q, k, v, bias, out, lse, draws, (causal, scale, window, offset, start, first, real), None)


@operator(
    "explicit_attention_bias_backward",
    results=lambda grad, q, k, v, bias, *_: (
        _like(q), _like(k), _like(v), torch.empty_like(bias, memory_format=torch.contiguous_format),
    ),
    fit=_fit_gradients,
)  # fmt: skip
def explicit_attention_bias_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, seed_step: Tensor | None, call: int,
    p: float, global_shape: Sequence[int], local_shape: Sequence[int], offsets: Sequence[int], causal: bool, scale: float, window: int = 0,
    offset: int = 0, start: int = 0, first: int = 0, real: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `explicit_attention_backward`, with the gradient of the bias."""
    draws = (seed_step, call, p, global_shape, local_shape, offsets)
    dbias = bias.new_zeros(bias.shape, dtype=lse.dtype)
    found = _gradients(grad, q, k, v, bias, out, lse, draws, (causal, scale, window, offset, start, first, real), dbias)
    return *found, dbias.to(bias.dtype)


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, draws: tuple[Any, ...],
    how: tuple[bool, float, int, int, int, int, int | None], dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; that of the bias is added to `dbias`."""
    causal, scale, window, offset, start, first, end = how
    real = k.shape[2] if end is None else end
    _check(k, bias, causal, window, offset, real)
    drops = _WeightDropout.of(draws, q, k)
    sees = _CausalWindow(q.shape[2], real, causal, window, start + offset - first)
    dq, dk, dv = _like(q).zero_(), *(_like(x).to(lse.dtype).zero_() for x in (k, v))
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


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, seed_step, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, bias, seed_step, *output)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, seed_step, out, lse = ctx.saved_tensors
    call, p, _, _, _, causal, scale, *place = ctx.how
    if double_backward.is_differentiated() and not any(place):
        kept = None if seed_step is None else partial(dropout, seed_step=seed_step, call=call, p=p)
        found = double_backward.differentiable_gradients(
            lambda q, k, v, b: [in_full(q, k, v, b, causal, scale, kept)[0]], (q, k, v, bias), (grad,)
        )
        return *found, *[None] * 13
    back = explicit_attention_bias_backward if ctx.needs_input_grad[3] else explicit_attention_backward
    found = back(grad, q, k, v, bias, out, lse, seed_step, *ctx.how)
    return *found[:3], found[3] if len(found) > 3 else None, *[None] * 13


explicit_attention.register_autograd(_backward, setup_context=_setup)
