"""Causal attention with an offset or a sliding window, composed of calls to kernels that support neither.

    keys       0 1 2 3 4 5 6 7                 queries 4..7 of a causal model, a rank's tile (offset 4):
    query 4    # # # # # . . .                   keys 0..3, which all of them see, without a mask
    query 5    # # # # # # . .                   keys 4..7, causal
    query 6    # # # # # # # .                 the two are merged by log-sum-exp
    query 7    # # # # # # # #

With a window, rows are computed in blocks, each with the few keys that it sees and a small mask; all blocks but the first and last have
the same mask. Time grows with the number of visible scores, memory with one block.

Shapes: queries [batch, heads, q, head], keys and values [batch, heads, k, head]; query i stands at key position i + offset and sees keys
j <= i + offset, of these the last `window` if that is not 0. A query beyond the last key's window (padding) sees none and gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
"""Least number of rows of a block: a kernel's own blocks are 32 to 128 rows."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], tuple[Tensor, Tensor]]
"""(q, k, v, bias, causal from the first key on) -> (out, lse)"""
BackwardKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor]]
"""(grad, q, k, v, bias, out, lse, causal) -> (dq, dk, dv)"""


@dataclass(frozen=True)
class Span:
    """Rows of queries with a range of keys. `how`: they see all ("all"), causally from the first on ("causal"), or by a mask ("band")."""

    rows: slice
    keys: slice
    how: str


def spans(queries: int, keys: int, window: int, offset: int) -> Iterator[tuple[slice, list[Span]]]:
    """(rows, spans): row blocks in order, each with the spans of keys that it sees."""
    if not window:
        rows, seen, end = slice(0, queries), min(offset, keys), min(offset + queries, keys)
        whole = [Span(rows, slice(0, seen), "all")] if seen else []
        yield rows, whole + ([Span(rows, slice(seen, end), "causal")] if end > seen else [])
        return
    step = max(window, BLOCK)
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        first, end = max(0, start + offset - window + 1), min(rows.stop + offset, keys)
        yield rows, [Span(rows, slice(first, end), "band")] if end > first else []


def band(span: Span, window: int, offset: int, like: Tensor) -> Tensor:
    """[1, 1, rows, keys]: 0 where a query sees a key, else minus infinity."""
    at = torch.arange(span.rows.start + offset, span.rows.stop + offset, device=like.device).unsqueeze(1)
    keys = torch.arange(span.keys.start, span.keys.stop, device=like.device)
    zero, never = like.new_zeros(()), like.new_full((), -math.inf)
    return torch.where((keys <= at) & (keys > at - window), zero, never)[None, None]


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, offset: int) -> None:
    """Fill `out` like q and `lse` [batch, heads, q]."""
    masks = _Masks(window, offset, q)
    for rows, seen in spans(q.shape[2], k.shape[2], window, offset):
        found = [
            kernel(q[:, :, rows], k[:, :, span.keys], v[:, :, span.keys], masks.of(span), span.how == "causal") for span in seen
        ]
        if not found:
            out[:, :, rows], lse[:, :, rows] = 0, 0
        elif len(found) == 1:
            out[:, :, rows], lse[:, :, rows] = found[0]
        else:
            (first, a), (second, b) = found
            both = torch.logaddexp(a, b)
            out[:, :, rows] = first * (a - both).exp().unsqueeze(-1) + second * (b - both).exp().unsqueeze(-1)
            lse[:, :, rows] = both


def backward(
    kernel: BackwardKernel, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. The part of one span needs only `out` and `lse` of its rows over all spans."""
    masks = _Masks(window, offset, q)
    dq, dk, dv = (_zeros(x) for x in (q, k, v))
    for rows, seen in spans(q.shape[2], k.shape[2], window, offset):
        for span in seen:
            keys, mask = span.keys, masks.of(span)
            given = grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, out[:, :, rows], lse[:, :, rows]
            found = kernel(*given, span.how == "causal")
            dq[:, :, rows] += found[0]
            dk[:, :, keys] += found[1]
            dv[:, :, keys] += found[2]
    return dq, dk, dv


def _zeros(x: Tensor) -> Tensor:
    """Zeros in the layout of the kernels' gradients: by row, then head."""
    return x.new_zeros(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


class _Masks:
    """Masks of blocks, memoised."""

    def __init__(self, window: int, offset: int, like: Tensor) -> None:
        self.window, self.offset, self.like = window, offset, like
        self.known: dict[tuple[int, int, int], Tensor] = {}

    def of(self, span: Span) -> Tensor | None:
        if span.how != "band":
            return None
        shape = (span.rows.stop - span.rows.start, span.keys.stop - span.keys.start, span.rows.start - span.keys.start)
        if shape not in self.known:
            self.known[shape] = band(span, self.window, self.offset, self.like)
        return self.known[shape]
