"""Fold masks: a mask made of positions alone becomes attributes of attention; one made of an input stays what it is."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.nn import functional as F

from tests.passes.stepped import around, changed


class Masked(nn.Module):
    """Query i sees keys i - window < j <= i, and of these what `keep` says."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        queries, keys = torch.arange(6)[:, None], torch.arange(6)
        seen = (keys <= queries) & (keys > queries - self.window)
        return F.scaled_dot_product_attention(x, x, x, seen if keep is None else seen & keep[:, None, None])


def folded(model: nn.Module, **inputs: Tensor) -> str:
    with torch.no_grad():
        return changed(*around("fold_masks", model, "dp=2", x=torch.zeros(2, 2, 6, 3), **inputs))


def test_a_causal_window_becomes_attributes() -> None:
    assert_expected_inline(folded(Masked(3)), """\
- arange: "i64[6]" = aten.arange(6, device=cpu, pin_memory=False)
- unsqueeze: "i64[6, 1]" = aten.unsqueeze(arange, 1)
- arange_1: "i64[6]" = aten.arange(6, device=cpu, pin_memory=False)
- le: "b8[6, 6]" = aten.le.Tensor(arange_1, unsqueeze)
- sub: "i64[6, 1]" = aten.sub.Tensor(unsqueeze, 3)
- gt: "b8[6, 6]" = aten.gt.Tensor(arange_1, sub)
- bitwise_and: "b8[6, 6]" = aten.bitwise_and.Tensor(le, gt)
- zeros: "f32[]" = aten.zeros([], dtype=f32, device=cpu, pin_memory=False)
- full: "f32[]" = aten.full([], -inf, dtype=f32, device=cpu, pin_memory=False)
- where: "f32[6, 6]" = aten.where.self(bitwise_and, zeros, full)
- view: "f32[1, 1, 6, 6]" = aten.reshape(where, [1, 1, 6, 6])
- attention: "(f32[2, 2, 6, 3], f32[2, 2, 6])" = meshc.attention(x, x, x, view, False, 0.5773502691896258)
+ attention: "(f32[2, 2, 6, 3], f32[2, 2, 6])" = meshc.attention(x, x, x, None, True, 0.5773502691896258, 3, 0)
""")


def test_a_mask_with_an_input_in_it_stays() -> None:
    assert folded(Masked(3), keep=torch.ones(2, 6, dtype=torch.bool)) == ""
