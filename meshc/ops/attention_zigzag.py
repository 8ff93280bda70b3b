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
from meshc.ops.attention import _backward_kernel, _empty, _fit, _fit_backward, _kernel, _like
from meshc.ops.attention_block import attention_block, attention_block_backward, attention_merge
from meshc.ops.definition import operator
from meshc.ops.operands import misfit

_block, _block_backward, _merge = attention_block._init_fn, attention_block_backward._init_fn, attention_merge._init_fn


@operator("attention_zigzag", results=lambda q, k, v, *_: _empty(q, v), fit=lambda q, k, v, *_: _fit_tiles("attention_zigzag", q, k, v))
def attention_zigzag(
    q: Tensor, k: Tensor, v: Tensor, scale: float, queries_of: int, keys_of: int, ranks: int, length: int
) -> tuple[Tensor, Tensor]:
    _check(queries_of, keys_of, ranks)
    if length == ranks * q.shape[2]:
        return _at_once(q, k, v, scale, queries_of, keys_of, ranks)
    out, lse = _empty(q, v)
    out.zero_(), lse.fill_(-torch.inf)
    for rows, start, seen in _pairs(q.shape[2], queries_of, keys_of, ranks, length):
        asked = q[:, :, rows]
        parts = [_block(asked, k[:, :, keys], v[:, :, keys], None, True, scale, 0, 0, start, *at) for keys, *at in seen]
        if parts:
            out[:, :, rows], lse[:, :, rows] = parts[0] if len(parts) == 1 else _merge(*parts[0], *parts[1])
    return out, lse


def _at_once(q: Tensor, k: Tensor, v: Tensor, scale: float, queries_of: int, keys_of: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Attention in one kernel call, without padding: both visible pairs of halves, or all of a rank's own keys."""
    if queries_of == keys_of:
        return _kernel(scale, q, k, v, None, True)
    rows, keys = _visible_slices(q.shape[2], queries_of, keys_of, ranks)
    part, sums = _kernel(scale, q[:, :, rows], k[:, :, keys], v[:, :, keys], None, False)
    if part.shape == q.shape:
        return part, sums
    out, lse = _empty(q, v)
    out.zero_(), lse.fill_(-torch.inf)
    out[:, :, rows], lse[:, :, rows] = part, sums
    return out, lse


def _visible_slices(tile: int, queries_of: int, keys_of: int, ranks: int) -> tuple[slice, slice]:
    """Slices (queries, keys) of two ranks that see each other fully: one rank's two halves are always between the other's."""
    (_, asks), (second, _) = halves(tile, queries_of, ranks)
    (first, asked), _ = halves(tile, keys_of, ranks)
    return (second, slice(0, tile)) if asks < asked else (slice(0, tile), first)


def _pairs(tile: int, queries_of: int, keys_of: int, ranks: int, length: int) -> Iterator[tuple[slice, int, list[tuple[slice, int, int]]]]:
    """For each half of the queries: its rows, its first position, and the halves of keys that it sees in part: (rows, first, real)."""
    keys = [(rows, first, min(max(length - first, 0), rows.stop - rows.start)) for rows, first in halves(tile, keys_of, ranks)]
    for rows, start in halves(tile, queries_of, ranks):
        yield rows, start, [one for one in keys if one[2] and one[1] < start + rows.stop - rows.start]


def halves(tile: int, place: int, ranks: int) -> list[tuple[slice, int]]:
    """(rows, position of the first row) of both halves of a rank's zigzag tile."""
    (first, keep), (second, _) = zigzag_halves(tile * ranks, ranks, place)
    return [(slice(0, keep), first), (slice(keep, tile), second)]


def _fit_tiles(operator: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    _fit(operator, q, k, v, None)
    if q.shape[2] != k.shape[2]:
        raise misfit(operator, "tiles of queries and of keys are as long", q=q, k=k)


def _check(queries_of: int, keys_of: int, ranks: int) -> None:
    if not (0 <= queries_of < ranks and 0 <= keys_of < ranks):
        raise ValueError(f"meshc::attention_zigzag: {queries_of} and {keys_of} are places among {ranks} ranks")


def _fit_gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *_: object) -> None:
    _fit_backward(grad, q, k, v, None, out, lse)
    _fit_tiles("attention_zigzag_backward", q, k, v)


@operator("attention_zigzag_backward", results=lambda grad, q, k, v, *_: (_like(q), _like(k), _like(v)), fit=_fit_gradients)
def attention_zigzag_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    queries_of: int,
    keys_of: int,
    ranks: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(queries_of, keys_of, ranks)
    if length == ranks * q.shape[2]:
        return _back_at_once(grad, q, k, v, out, lse, scale, queries_of, keys_of, ranks)
    dq, dk, dv = (_like(x).zero_() for x in (q, k, v))
    for rows, start, seen in _pairs(q.shape[2], queries_of, keys_of, ranks, length):
        known, made, sums = (x[:, :, rows] for x in (grad, out, lse))
        for keys, *at in seen:
            given = known, q[:, :, rows], k[:, :, keys], v[:, :, keys], None, made, sums
            for total, part in zip((dq[:, :, rows], dk[:, :, keys], dv[:, :, keys]), _block_backward(*given, True, scale, 0, 0, start, *at),
                                   strict=True):  # fmt: skip
                total += part
    return dq, dk, dv


def _back_at_once(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, queries_of: int, keys_of: int, ranks: int
) -> tuple[Tensor, Tensor, Tensor]:
    if queries_of == keys_of:
        return _backward_kernel(scale, grad, q, k, v, None, out, lse, True)
    rows, keys = _visible_slices(q.shape[2], queries_of, keys_of, ranks)
    given = grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], None, out[:, :, rows], lse[:, :, rows]
    dq, dk, dv = _backward_kernel(scale, *given, False)
    return _pad_with_zeros(dq, rows, q), _pad_with_zeros(dk, keys, k), _pad_with_zeros(dv, keys, v)


def _pad_with_zeros(part: Tensor, where: slice, like: Tensor) -> Tensor:
    """`part` padded with zeros for the rows outside `where`, in the shape of `like`."""
    if part.shape == like.shape:
        return part
    whole = _like(like).zero_()
    whole[:, :, where] = part
    return whole
