"""Attention over one block of keys in zigzag order, which balances the work of causal ring attention among ranks.

    tiles of 4 ranks, halves by number       natural  0 1 | 2 3 | 4 5 | 6 7         zigzag  0 7 | 2 5 | 3 4 | 1 6

Under a causal mask a query sees the keys before it, so the last natural tile sees all keys and the first nearly none. In zigzag order rank
r has the first half of its own tile and the second half of tile n - 1 - r, the earlier one first: of another rank's keys each rank sees
two of the four pairs of halves, of its own keys those up to each query.

    q, k, v  [batch, heads, tile, head], the tiles of the ranks `queries_of` and `keys_of` of `ranks`, of a sequence of `length` positions
    out      like q, over the keys of that tile alone; lse [batch, heads, tile]; tiles are merged by `attention_merge`

Of a tile of odd length the first half is the longer one. Positions from `length` on are padding, which is never read. A query that
sees no key of the tile has out 0 and lse minus infinity there. Backward takes `out` and `lse` of all tiles together.

Brandon et al.: Striped Attention (arXiv:2311.09431) explains why a causal ring needs another order. The Llama 3 Herd of Models
(arXiv:2407.21783) pairs a chunk from the front with one from the back, as here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from meshc.ir.sharding import zigzag_halves
from meshc.ops.attention import _empty, _fit, _like, _zeros_like, attention, attention_backward, pad_gradient
from meshc.ops.attention_join import attention_merge
from meshc.ops.definition import misfit, operator

_forward, _backward, _merge = attention._init_fn, attention_backward._init_fn, attention_merge._init_fn


def _fit_tiles(
    operator: str, q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None
) -> None:
    _fit(operator, q, k, v, None, grad, out, lse)
    if q.shape[2] != k.shape[2]:
        raise misfit(operator, "tiles of queries and of keys are as long", q=q, k=k)


@operator("attention_zigzag", results=_empty, fit=_fit_tiles)
def attention_zigzag(
    q: Tensor, k: Tensor, v: Tensor, scale: float, queries_of: int, keys_of: int, ranks: int, length: int
) -> tuple[Tensor, Tensor]:
    found = []
    for rows, seen in _visible_keys(q.shape[2], queries_of, keys_of, ranks, length):
        parts = [_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], None, causal, scale, 0, 0, *at) for keys, causal, *at in seen]
        found += [(rows, parts[0] if len(parts) == 1 else _merge(*parts[0], *parts[1]))] if parts else []
    if len(found) == 1 and found[0][1][0].shape == q.shape:
        return found[0][1]
    out, lse = _empty(q, v)
    out.zero_(), lse.fill_(-torch.inf)
    for rows, (made, sums) in found:
        out[:, :, rows], lse[:, :, rows] = made, sums
    return out, lse


def _visible_keys(tile: int, queries_of: int, keys_of: int, ranks: int, length: int) -> Iterator[tuple[slice, list[tuple]]]:
    """Rows of queries, each with the keys that they see: (keys, whether causally, start, first, real) as `attention` has them. Without
    padding one call is enough: both visible pairs of halves, or all of a rank's own keys."""
    if not (0 <= queries_of < ranks and 0 <= keys_of < ranks):
        raise ValueError(f"meshc::attention_zigzag: {queries_of} and {keys_of} are places among {ranks} ranks")
    asks, asked = halves(tile, queries_of, ranks), halves(tile, keys_of, ranks)
    if length == ranks * tile:
        whole = slice(0, tile)
        if queries_of == keys_of:
            yield whole, [(whole, True, 0, 0, None)]
        elif asks[0][1] < asked[0][1]:  # one rank's two halves are always between the other's
            yield asks[1][0], [(whole, False, 0, 0, None)]
        else:
            yield whole, [(asked[0][0], False, 0, 0, None)]
        return
    keys = [(rows, True, first, min(max(length - first, 0), rows.stop - rows.start)) for rows, first in asked]
    for rows, start in asks:
        yield rows, [(one, how, start, first, real) for one, how, first, real in keys if real and first < start + rows.stop - rows.start]


def halves(tile: int, place: int, ranks: int) -> list[tuple[slice, int]]:
    """(rows, position of the first row) of both halves of a rank's zigzag tile."""
    (first, keep), (second, _) = zigzag_halves(tile * ranks, ranks, place)
    return [(slice(0, keep), first), (slice(keep, tile), second)]


@operator("attention_zigzag_backward", results=lambda q, k, v: (_like(q), _like(k), _like(v)), fit=_fit_tiles)
def attention_zigzag_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, queries_of: int, keys_of: int, ranks: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found = []
    for rows, seen in _visible_keys(q.shape[2], queries_of, keys_of, ranks, length):
        known, asked, made, sums = (x[:, :, rows] for x in (grad, q, out, lse))
        for keys, causal, *at in seen:
            gradients = _backward(known, asked, k[:, :, keys], v[:, :, keys], None, made, sums, causal, scale, 0, 0, *at)
            found.append((((q, rows), (k, keys), (v, keys)), gradients))
    if len(found) == 1:
        dq, dk, dv = (pad_gradient(one, rows, x) for (x, rows), one in zip(*found[0], strict=True))
        return dq, dk, dv
    totals = [_zeros_like(x) for x in (q, k, v)]
    for places, gradients in found:
        for total, (_, rows), one in zip(totals, places, gradients, strict=True):
            total[:, :, rows] += one
    dq, dk, dv = totals
    return dq, dk, dv
