"""Parts of attention, each to some of the keys, joined at once, are attention to all of them."""

from __future__ import annotations

import math

import torch

from meshc.ops.attention import attention
from meshc.ops.attention_join import attention_join


def test_parts_are_the_whole() -> None:
    """Of one query the first part hides all; tiles of 4, the last with 3 keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 4, dtype=torch.float64) for size in (5, 7, 7))
    bias = torch.randn(1, 1, 5, 7, dtype=torch.float64)
    bias[:, :, 2, :4] = -math.inf
    parts = []
    for first in (0, 4):
        real = min(4, 7 - first)
        tile = [torch.nn.functional.pad(x[:, :, first : first + real], (0, 0, 0, 4 - real), value=math.nan) for x in (k, v)]
        mask = torch.nn.functional.pad(bias[..., first : first + real], (0, 4 - real))
        out, lse = attention(q, *tile, mask, False, 0.5, 0, 0, 0, first, real)
        parts.append(torch.cat([out, lse.unsqueeze(-1)], -1))
    torch.testing.assert_close(attention_join(torch.stack(parts)), attention(q, k, v, bias, False, 0.5))


def test_a_query_that_no_part_shows_anything_gives_zeros() -> None:
    parts = torch.cat([torch.zeros(3, 1, 1, 2, 4), torch.full((3, 1, 1, 2, 1), -math.inf)], -1)
    out, lse = attention_join(parts)
    assert not out.any() and (lse == -math.inf).all()
