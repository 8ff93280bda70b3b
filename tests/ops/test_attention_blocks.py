"""Attention in blocks of keys, joined, is attention; whatever lies in the padding of a block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops.attention import attention, attention_backward
from meshc.ops.attention_join import attention_merge

SHAPE = 2, 3
SCALE = 0.5


class Blocks:
    """Queries, and keys in `count` tiles of one length: what is behind the last key is NaN."""

    def __init__(self, queries: int, keys: int, count: int, biased: bool = False, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.q, self.grad = (torch.randn(*SHAPE, queries, 4).to(dtype) for _ in range(2))
        self.k, self.v = (torch.randn(*SHAPE, keys, 4).to(dtype) for _ in range(2))
        self.bias = self._bias(queries, keys, dtype) if biased else None
        self.tile, self.count = -(-keys // count), count

    @staticmethod
    def _bias(queries: int, keys: int, dtype: torch.dtype) -> Tensor:
        """Of one query all keys are hidden, of others those of some blocks."""
        bias = torch.randn(2, 1, queries, keys).to(dtype)
        bias.masked_fill_(torch.rand(bias.shape) < 0.7, -torch.inf)
        bias[0, 0, 1] = -torch.inf
        return bias

    def of(self, block: int) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
        """(keys, values, bias, where they begin, how many are real)"""
        first = block * self.tile
        keys, values = (_tile(x, 2, first, self.tile, torch.nan) for x in (self.k, self.v))
        real = max(0, min(self.k.shape[2] - first, self.tile))
        return keys, values, None if self.bias is None else _tile(self.bias, 3, first, self.tile, 0.0), first, real

    def forward(self, *how: int | bool) -> tuple[Tensor, Tensor]:
        """Joined from the last block to the first."""
        causal, *rest = how
        found: tuple[Tensor, Tensor] | None = None
        for block in reversed(range(self.count)):
            keys, values, bias, first, real = self.of(block)
            part = attention(self.q, keys, values, bias, causal, SCALE, *rest, 0, first, real)
            found = part if found is None else attention_merge(*found, *part)
        assert found is not None
        return found

    def backward(self, out: Tensor, lse: Tensor, *how: int | bool) -> list[Tensor]:
        causal, *rest = how
        parts = []
        for block in range(self.count):
            keys, values, bias, first, real = self.of(block)
            given = self.grad, self.q, keys, values, bias, out, lse
            parts.append(attention_backward(*given, causal, SCALE, *rest, 0, first, real))
        dq, dk, dv = (list(x) for x in zip(*parts, strict=True))
        keys = self.k.shape[2]
        assert not torch.cat(dk, 2)[:, :, keys:].any() and not torch.cat(dv, 2)[:, :, keys:].any()
        return [sum(dq[1:], dq[0]), torch.cat(dk, 2)[:, :, :keys], torch.cat(dv, 2)[:, :, :keys]]


def _tile(x: Tensor, dim: int, first: int, length: int, fill: float) -> Tensor:
    piece = x.narrow(dim, min(first, x.shape[dim]), max(0, min(length, x.shape[dim] - first)))
    shape = list(x.shape)
    shape[dim] = length - piece.shape[dim]
    return torch.cat([piece, x.new_full(shape, fill)], dim)


@pytest.mark.parametrize("queries, keys", [(5, 5), (3, 7), (300, 300)])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("window, offset", [(0, 0), (0, 2), (1, 0), (3, 0), (3, 2), (150, 0)])
def test_causal_blocks_are_attention(queries: int, keys: int, count: int, window: int, offset: int) -> None:
    """A window of 1 leaves most blocks nothing to see; of 8 blocks of 5 keys the last hold no key at all."""
    blocks, how = Blocks(queries, keys, count), (True, window, offset)
    out, lse = attention(blocks.q, blocks.k, blocks.v, None, True, SCALE, window, offset)
    found = blocks.forward(*how)
    torch.testing.assert_close(found[0], out)
    wanted = attention_backward(blocks.grad, blocks.q, blocks.k, blocks.v, None, out, lse, True, SCALE, window, offset)
    torch.testing.assert_close(blocks.backward(*found, *how), list(wanted))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_blocks_without_a_causal_mask_are_attention(count: int, biased: bool) -> None:
    blocks, how = Blocks(5, 7, count, biased), (False, 0, 0)
    out, lse = attention(blocks.q, blocks.k, blocks.v, blocks.bias, False, SCALE)
    found = blocks.forward(*how)
    torch.testing.assert_close(found[0], out)
    if biased:
        assert not found[0][0, :, 1].any() and (found[1][0, :, 1] == -torch.inf).all(), "a query from which all is hidden"
    wanted = attention_backward(blocks.grad, blocks.q, blocks.k, blocks.v, blocks.bias, out, lse, False, SCALE)
    torch.testing.assert_close(blocks.backward(*found, *how), list(wanted))


def test_parts_in_bfloat16_are_joined_in_float32() -> None:
    blocks = Blocks(64, 64, 8, dtype=torch.bfloat16)
    out, lse = blocks.forward(True, 0, 0)
    wanted, _ = attention(*(x.float() for x in (blocks.q, blocks.k, blocks.v)), None, True, SCALE)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-2)


def test_what_a_part_weighs_is_its_sum_of_exponentials() -> None:
    """Weights 1 and 3, by hand; a part that has seen nothing weighs nothing, also beside another that has not."""
    one, two = torch.full((1, 1, 3, 1), 8.0), torch.full((1, 1, 3, 1), 4.0)
    nothing = -torch.inf
    out, lse = attention_merge(one, torch.tensor([[[0.0, nothing, nothing]]]), two, torch.tensor([[[3.0, 3.0, nothing]]]).log())
    assert out[0, 0, :2, 0].tolist() == pytest.approx([5.0, 4.0]) and lse[0, 0, :2].exp().tolist() == pytest.approx([4.0, 3.0])
    empty, none = torch.zeros(1, 1, 3, 1), torch.full((1, 1, 3), nothing)
    out, lse = attention_merge(empty, none, empty, none)
    assert not out.any() and (lse == nothing).all()


def test_how_many_keys_a_block_has_is_asked() -> None:
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="4 of 3 positions are keys"):
        attention(q, q, q, None, False, SCALE, 0, 0, 0, 0, 4)
    with pytest.raises(ValueError, match="says what a causal mask without a bias is"):
        attention(q, q, q, None, False, SCALE, 2, 0, 0, 0, 3)
