"""`meshc::attention`: scaled dot-product attention of queries to keys at stated positions, one node forward and one backward.

    q  [batch, heads, q, head]        k  [batch, heads, k, head]        v  [batch, heads, k, head]
    bias  [batch|1, heads|1, q|1, k|1], added to the scores, or None      out  [batch, heads, q, head], lse  [batch, heads, q]

The queries are `start`, `start + 1`, ...; the keys `first`, `first + 1`, ... With `causal`, and no bias, query i sees keys j <= i + offset,
and of these the last `window` if that is not 0; `offset` keys stand before the first query (a cache).

`real`: the keys are a block of all keys, of which the first `real` positions are read, the others are padding. A query that sees no key of
a block has out 0 and lse minus infinity there, and results of blocks are merged by log-sum-exp (`attention_join.py`). Backward takes `out`
and `lse` of all blocks together; gradients of blocks add up to that of the query, and gradients of padding are 0.

`seed_step`, and what follows it: weights are dropped with probability `p`, as `explicit_attention.py` says.

Kernels: torch's blocked flash kernel on the CPU, those of `attention_cuda.py` on CUDA. Other cases: dropout and the gradient of a bias,
`explicit_attention.py`; head sizes that differ, matmul, softmax, matmul in `sdpa.py`; offsets and windows, `attention_spans`; keys that a
bias masks are skipped by `attention_masked_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from meshc.ops import attention_cuda, attention_masked_blocks, attention_spans, double_backward, explicit_attention
from meshc.ops.attention_in_full import in_full
from meshc.ops.definition import misfit, operator
from meshc.ops.explicit_attention import CausalWindow, Draws
from meshc.ops.random import dropout

aten: Final = torch.ops.aten


def _rows(*heads: Tensor) -> list[Tensor]:
    """Operands with a contiguous last dim: all kernels read heads so, whatever the strides are."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in heads]


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised `(out, lse)` with the strides of the kernels' results."""
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    if q.is_cuda:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        return out, q.new_empty(q.shape[:3], dtype=accumulate)
    # the CPU kernel's output has the strides of the queries; its sums are ordered by row, then head
    return torch.empty_like(*_rows(q)), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulate).transpose(1, 2)


def _spreads(bias: Tensor, shape: tuple[int, ...]) -> bool:
    return bias.dim() == 4 and all(mine in (1, size) for mine, size in zip(bias.shape, shape, strict=True))


def _fit(
    operator: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, grad: Tensor | None = None, out: Tensor | None = None,
    lse: Tensor | None = None, causal: bool = False, window: int = 0, offset: int = 0, real: int | None = None,
    seed_step: Tensor | None = None, local_shape: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """Raises ValueError unless sizes match: the CPU kernel indexes keys, values and bias by the queries' sizes."""
    fits = q.dim() == k.dim() == 4 and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3]
    fits = fits and v.shape == k.shape and q.dtype == k.dtype == v.dtype
    if not fits or bias is not None and not _spreads(bias, (*q.shape[:3], k.shape[2])):
        rule = "k and v are like q but for their number of keys, and a bias [batch|1, heads|1, queries|1, keys|1] is of these sizes"
        raise misfit(operator, rule, q=q, k=k, v=v, bias=bias)
    if (seed_step is not None or local_shape) and (
        seed_step is None or math.prod(local_shape or ()) != q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    ):
        rule = f"the local shape {list(local_shape or ())} holds a draw for each weight, and there is a seed_step; or there is neither"
        raise misfit(operator, rule, q=q, k=k, seed_step=seed_step)
    if grad is not None and out is not None and lse is not None:
        sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        fits = grad.shape == q.shape == out.shape and lse.shape == q.shape[:3] and grad.dtype == q.dtype == out.dtype and lse.dtype == sums
        if not fits:
            rule = f"grad and out are like q, lse {sums} and like q without its last dim"
            raise misfit(operator, rule, q=q, grad=grad, out=out, lse=lse)
    if real is not None and not 0 <= real <= k.shape[2]:
        raise ValueError(f"meshc::attention: {real} of {k.shape[2]} positions are keys")
    if (window or offset) and not causal or window < 0 or offset < 0 or causal and bias is not None:
        raise ValueError("meshc::attention: a window or an offset says what a causal mask without a bias is")


@operator("attention", results=_empty, fit=_fit)
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float, window: int = 0, offset: int = 0, start: int = 0,
    first: int = 0, real: int | None = None, seed_step: Tensor | None = None, call: int = 0, p: float = 0.0,
    global_shape: Sequence[int] | None = None, local_shape: Sequence[int] | None = None, offsets: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    at = start + offset - first
    if seed_step is not None:
        out, lse = _empty(q, v)
        sees = CausalWindow(q.shape[2], k.shape[2] if real is None else real, causal, window, at)
        explicit_attention.forward(q, k, v, bias, scale, sees, (seed_step, call, p, global_shape, local_shape, offsets), out, lse)
        return out, lse
    k, v, bias = _real_keys(k, v, bias, real)
    if not causal or not (window or at or real is not None):
        out, lse = _kernel(scale, q, k, v, bias, causal)
        return (out, lse) if real is None else _no_visible_keys(out, lse, bias)
    rows = rows_that_see(q.shape[2], k.shape[2], window, at)
    out, lse = _empty(q, v)
    if rows.stop - rows.start < q.shape[2]:
        out.zero_(), lse.fill_(-math.inf)
    if rows.stop > rows.start:
        kernel = partial(_kernel, scale)
        attention_spans.forward(kernel, q[:, :, rows], k, v, out[:, :, rows], lse[:, :, rows], window, at + rows.start)
    return out, lse


def _real_keys(k: Tensor, v: Tensor, bias: Tensor | None, real: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if real is None:
        return k, v, bias
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


def _kernel(scale: float, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    if _sees_nothing(q, k):
        out, lse = _empty(q, v)
        return out.zero_(), lse.fill_(-math.inf)
    q, k, v = _rows(q, k, v)
    if q.is_cuda:
        return attention_cuda.forward(q, k, v, bias, causal, scale)
    kernel = partial(_on_cpu, scale)
    if bias is None or causal:
        return kernel(q, k, v, bias, causal)
    return attention_masked_blocks.forward(kernel, q, k, v, bias, partial(_empty, q, v))


def _on_cpu(scale: float, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _sees_nothing(q: Tensor, k: Tensor) -> bool:
    """Whether there are no queries or no keys: the CPU kernel divides by their number, which would abort the process."""
    return q.numel() == 0 or k.numel() == 0


@operator("attention_backward", results=lambda q, k, v: (_like(q), _like(k), _like(v)), fit=_fit)
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float,
    window: int = 0, offset: int = 0, start: int = 0, first: int = 0, real: int | None = None, seed_step: Tensor | None = None,
    call: int = 0, p: float = 0.0, global_shape: Sequence[int] | None = None, local_shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if seed_step is not None:
        how = causal, scale, window, offset, start, first, real, (seed_step, call, p, global_shape, local_shape, offsets)
        return _backward_by_weights(grad, q, k, v, bias, out, lse, *how, None)
    whole = k
    k, v, bias = _real_keys(k, v, bias, real)
    if real is not None:
        lse = torch.where(lse == -math.inf, math.inf, lse)  # a query that sees no key: all of its weights are 0
    kernel, rows, at = partial(_backward_kernel, scale), slice(0, q.shape[2]), start + offset - first
    if not causal or not (window or at or real is not None):
        dq, dk, dv = kernel(grad, q, k, v, bias, out, lse, causal)
    else:
        rows = rows_that_see(q.shape[2], k.shape[2], window, at)
        if rows.stop == rows.start:
            return _zeros_like(q), _zeros_like(whole), _zeros_like(whole)
        grad, asked, out, lse = (x[:, :, rows] for x in (grad, q, out, lse))
        dq, dk, dv = attention_spans.backward(kernel, grad, asked, k, v, out, lse, window, at + rows.start)
    keys = slice(0, k.shape[2])
    return pad_gradient(dq, rows, q), pad_gradient(dk, keys, whole), pad_gradient(dv, keys, whole)


@operator(
    "attention_bias_backward",
    results=lambda q, k, v, bias: (_like(q), _like(k), _like(v), torch.empty_like(bias, memory_format=torch.contiguous_format)),
    fit=_fit,
)
def attention_bias_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, window: int = 0,
    offset: int = 0, start: int = 0, first: int = 0, real: int | None = None, seed_step: Tensor | None = None, call: int = 0,
    p: float = 0.0, global_shape: Sequence[int] | None = None, local_shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `attention_backward`, with the gradient of the bias."""
    dbias = bias.new_zeros(bias.shape, dtype=lse.dtype)
    how = causal, scale, window, offset, start, first, real, (seed_step, call, p, global_shape, local_shape, offsets)
    return *_backward_by_weights(grad, q, k, v, bias, out, lse, *how, dbias), dbias.to(bias.dtype)


def _backward_by_weights(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float, window: int,
    offset: int, start: int, first: int, real: int | None, draws: Draws, dbias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sees = CausalWindow(q.shape[2], k.shape[2] if real is None else real, causal, window, start + offset - first)
    return explicit_attention.backward(grad, q, k, v, bias, out, lse, scale, sees, draws, _zeros_like, dbias)


def _backward_kernel(
    scale: float, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if _sees_nothing(q, k):
        return _zeros_like(q), _zeros_like(k), _zeros_like(v)
    grad, q, k, v, out = _rows(grad, q, k, v, out)
    if q.is_cuda:
        return attention_cuda.backward(grad, q, k, v, bias, out, lse, causal, scale)
    kernel = partial(_backward_on_cpu, scale)
    if bias is None or causal:
        return kernel(grad, q, k, v, bias, out, lse, causal)
    return attention_masked_blocks.backward(kernel, grad, q, k, v, bias, out, lse, _zeros_like)


def _backward_on_cpu(
    scale: float, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale
    )
    return found


def _like(x: Tensor) -> Tensor:
    """An uninitialised gradient of `x` with the strides of the kernels' gradients."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def _zeros_like(x: Tensor) -> Tensor:
    return _like(x).zero_()


def pad_gradient(gradient: Tensor, rows: slice, x: Tensor) -> Tensor:
    """A gradient of these rows of `x`, with zeros for its other rows, in the layout of the kernels' gradients."""
    if gradient.shape == x.shape:
        return gradient
    found = _zeros_like(x)
    found[:, :, rows] = gradient
    return found


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, bias, *how = inputs
    ctx.how, (seed_step, *ctx.draws) = how[:7], how[7:]
    ctx.save_for_backward(q, k, v, bias, seed_step, *output)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    q, k, v, bias, seed_step, out, lse = ctx.saved_tensors
    causal, scale, *place = ctx.how
    if double_backward.is_differentiated() and not any(place):
        kept = None if seed_step is None else partial(dropout, seed_step=seed_step, call=ctx.draws[0], p=ctx.draws[1])
        found = double_backward.differentiable_gradients(
            lambda q, k, v, b: [in_full(q, k, v, b, causal, scale, kept)[0]], (q, k, v, bias), (grad,)
        )
    else:
        back = attention_bias_backward if ctx.needs_input_grad[3] else attention_backward
        found = [*back(grad, q, k, v, bias, out, lse, *ctx.how, seed_step, *ctx.draws), None][:4]
    return *found, *[None] * 13


attention.register_autograd(_backward, setup_context=_setup)
