"""Operators of ring attention: attention over one block of keys, its gradients, and the merge of two blocks' results by log-sum-exp.

    out, lse = attention_block(q, k0, v0, ...)                      the rank's queries, its own keys
    more, more_lse = attention_block(q, k1, v1, ...)                the same queries, the keys of the rank before it
    out, lse = attention_merge(out, lse, more, more_lse)            equal to attention over all these keys at once

    q  [batch, heads, q, head]      k, v  [batch, heads, k, head]      bias  [batch|1, heads|1, q|1, k|1] or None
    out  like q; merged in float32 where q has fewer bits, since it is rounded once then      lse  [batch, heads, q]

The block is keys `first`, `first + 1`, ... of all keys; its first `real` positions are keys, the others padding, which is never read.
The queries are `start`, `start + 1`, ...; with `causal` query i sees key j where j <= i + offset, and of these the last `window`
if that is not 0. A query that sees no key of the block has out 0 and lse minus infinity there. Backward takes `out` and `lse` of all
blocks together; gradients of blocks add up to that of the query, and gradients of padding are 0.

Liu, Zaharia, Abbeel: Ring Attention with Blockwise Transformers for Near-Infinite Context (arXiv:2310.01889).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from meshc.ops import attention_spans
from meshc.ops.attention import _backward_kernel, _empty, _fit, _fit_backward, _kernel, _like
from meshc.ops.definition import operator
from meshc.ops.operands import misfit


@operator(
    "attention_block",
    results=lambda q, k, v, *_: _empty(q, v),
    fit=lambda q, k, v, bias, *_: _fit("attention_block", q, k, v, bias),
)
def attention_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, window: int, offset: int, start: int, first: int,
    real: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(k, bias, causal, window, offset, real)
    k, v, bias = _keys(k, v, bias, real)
    kernel = partial(_kernel, scale)
    if not causal:
        return _no_visible_keys(*kernel(q, k, v, bias, False), bias)
    at = start + offset - first
    rows = rows_that_see(q.shape[2], real, window, at)
    out, lse = _empty(q, v)
    if rows.stop - rows.start < q.shape[2]:
        out.zero_(), lse.fill_(-math.inf)
    if rows.stop > rows.start:
        attention_spans.forward(kernel, q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], window, at + rows.start)
    return out, lse


def _check(k: Tensor, bias: Tensor | None, causal: bool, window: int, offset: int, real: int) -> None:
    if not 0 <= real <= k.shape[2]:
        raise ValueError(f"meshc::attention_block: {real} of {k.shape[2]} positions are keys")
    if (window or offset) and not causal or window < 0 or offset < 0 or causal and bias is not None:
        raise ValueError("meshc::attention_block: a window or an offset says what a causal mask without a bias is")


def _keys(k: Tensor, v: Tensor, bias: Tensor | None, real: int) -> tuple[Tensor, Tensor, Tensor | None]:
    if bias is not None and bias.shape[3] != 1:
        bias = bias[:, :, :, :real]
    return k[:, :, :real], v[:, :, :real], bias


def rows_that_see(queries: int, keys: int, window: int, at: int) -> slice:
    """The contiguous range of queries that see a key of a block; the first query has the position of key `at` of the block."""
    first = min(max(0, -at), queries) if keys else queries
    end = min(queries, keys + window - 1 - at) if window else queries
    return slice(first, max(first, end))


def _no_visible_keys(out: Tensor, lse: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(out, lse)` set to 0 and minus infinity, in place, for queries to which the bias masks all keys of the block."""
    if bias is None or not bias.shape[3]:
        return out, lse
    dark = bias.amax(-1) == -math.inf
    return out.masked_fill_(dark.unsqueeze(-1), 0), lse.masked_fill_(dark, -math.inf)


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


@operator(
    "attention_block_backward",
    results=lambda grad, q, k, v, *_: (_like(q), _like(k), _like(v)),
    fit=lambda grad, q, k, v, bias, out, lse, *_: _fit_backward(grad, q, k, v, bias, out, lse),
)
def attention_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float, window: int,
    offset: int, start: int, first: int, real: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _check(k, bias, causal, window, offset, real)
    whole, padding = k, k.shape[2] - real
    k, v, bias = _keys(k, v, bias, real)
    lse = torch.where(lse == -math.inf, math.inf, lse)  # a query that sees no key: all of its weights are 0
    kernel = partial(_backward_kernel, scale)
    at = start + offset - first
    rows = rows_that_see(q.shape[2], real, window, at) if causal else slice(0, q.shape[2])
    if rows.stop == rows.start or not real:
        return _like(q).zero_(), _like(whole).zero_(), _like(whole).zero_()
    if causal:
        given = (x[:, :, rows] for x in (grad, q, out, lse))
        seen, asked, made, sums = given
        dq, dk, dv = attention_spans.backward(kernel, seen, asked, k, v, made, sums, window, at + rows.start)
    else:
        dq, dk, dv = kernel(grad, q, k, v, bias, out, lse, False)
    before, behind = rows.start, q.shape[2] - rows.stop
    return _pad_rows_with_zeros(dq, before, behind), _pad_rows_with_zeros(dk, 0, padding), _pad_rows_with_zeros(dv, 0, padding)


def _pad_rows_with_zeros(x: Tensor, before: int, behind: int) -> Tensor:
    """`x` with `before` and `behind` rows of zeros around it, in the layout of the kernels' gradients."""
    if not before and not behind:
        return x
    found = x.new_zeros(x.shape[0], before + x.shape[2] + behind, x.shape[1], x.shape[3]).transpose(1, 2)
    found[:, :, before : before + x.shape[2]] = x
    return found
