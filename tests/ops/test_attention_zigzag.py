"""Attention in tiles of zigzag order, joined, is causal attention; every rank has as much to do at every step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from meshc.ops.attention import attention, attention_backward
from meshc.ops.attention_join import attention_merge
from meshc.ops.attention_zigzag import attention_zigzag, attention_zigzag_backward, halves

SCALE = 0.5


def laid(x: Tensor, tile: int, ranks: int) -> list[Tensor]:
    """[batch, heads, length, ...] -> what each rank has; NaN behind the last position."""
    missing = tile * ranks - x.shape[2]
    padded = torch.cat([x, x.new_full((*x.shape[:2], missing, *x.shape[3:]), torch.nan)], 2)
    return [
        torch.cat([padded[:, :, at : at + rows.stop - rows.start] for rows, at in halves(tile, rank, ranks)], 2) for rank in range(ranks)
    ]


def put_together(tiles: list[Tensor], length: int) -> Tensor:
    tile, ranks = tiles[0].shape[2], len(tiles)
    whole = tiles[0].new_empty(*tiles[0].shape[:2], tile * ranks, *tiles[0].shape[3:])
    for rank, one in enumerate(tiles):
        for rows, at in halves(tile, rank, ranks):
            whole[:, :, at : at + rows.stop - rows.start] = one[:, :, rows]
    return whole[:, :, :length]


@pytest.mark.parametrize("length, ranks", [(16, 2), (13, 2), (12, 3), (20, 3), (19, 4), (9, 4), (5, 4)])
def test_tiles_joined_are_the_whole(length: int, ranks: int) -> None:
    """Tiles of even and of odd length; the last of 9 and of 5 positions over 4 ranks have one, and none."""
    torch.manual_seed(0)
    whole = q, k, v, grad = [torch.randn(2, 3, length, 4).double() for _ in range(4)]
    tile = -(-length // ranks)
    qs, ks, vs, grads = (laid(x, tile, ranks) for x in whole)
    qs, grads = ([torch.nan_to_num(x) for x in each] for each in (qs, grads))
    outs, sums = [], []
    for rank in range(ranks):
        parts = [attention_zigzag(qs[rank], ks[at], vs[at], SCALE, rank, at, ranks, length) for at in range(ranks)]
        out, lse = parts[rank]
        for at in (at for at in range(ranks) if at != rank):
            out, lse = attention_merge(out, lse, *parts[at])
        outs.append(out), sums.append(lse)
    out, lse = attention(q, k, v, None, True, SCALE)
    assert (put_together(outs, length) - out).abs().max() < 1e-12 and (put_together(sums, length) - lse).abs().max() < 1e-12
    dqs, dks, dvs = ([torch.zeros_like(qs[0]) for _ in range(ranks)] for _ in range(3))
    for rank in range(ranks):
        for at in range(ranks):
            given = grads[rank], qs[rank], ks[at], vs[at], outs[rank], sums[rank]
            found = attention_zigzag_backward(*given, SCALE, rank, at, ranks, length)
            for total, part in zip((dqs[rank], dks[at], dvs[at]), found, strict=True):
                total += part
    wanted = attention_backward(grad, q, k, v, None, out, lse, True, SCALE)
    for found, one in zip((dqs, dks, dvs), wanted, strict=True):
        assert (put_together(found, length) - one).abs().max() < 1e-12


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_rank_has_as_much_to_do_at_every_step(ranks: int) -> None:
    """Of a tile of 6: two pairs of halves in full, or one and two triangles. In natural order that is from none to all of them."""
    tile = 6
    places = [[p for rows, at in halves(tile, rank, ranks) for p in range(at, at + rows.stop - rows.start)] for rank in range(ranks)]
    assert sorted(p for each in places for p in each) == list(range(tile * ranks))
    for step in range(ranks):
        seen = {sum(j <= i for i in places[rank] for j in places[(rank - step) % ranks]) for rank in range(ranks)}
        assert seen == {tile * (tile + 1) // 2 if step == 0 else tile * tile // 2}


@pytest.mark.parametrize("length", [24, 21, 19])
@pytest.mark.parametrize("of", range(3))
@pytest.mark.parametrize("at", range(3))
def test_results_lie_as_they_are_said_to_lie(length: int, of: int, at: int) -> None:
    """Whichever halves a tile's are, with padding and without, queries as projections give them and as they are."""
    for q in (torch.randn(2, 3, 8, 4), torch.randn(2, 8, 3, 4).transpose(1, 2)):
        q = q[:, :, : -(-length // 3)]
        k, v = q.contiguous(), q.contiguous()
        given = (SCALE, of, at, 3, length)
        out, lse = attention_zigzag(q, k, v, *given)
        back = attention_zigzag_backward(out, q, k, v, out, lse, *given)
        with FakeTensorMode() as mode:
            asked, keys, values, made, sums = (mode.from_tensor(x) for x in (q, k, v, out, lse))
            said = list(attention_zigzag(asked, keys, values, *given))
            said += attention_zigzag_backward(made, asked, keys, values, made, sums, *given)
        assert [x.stride() for x in (out, lse, *back)] == [x.stride() for x in said]
