"""Bags of equally many rows against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from meshc.ops.bags import embedding_bag

GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_it_gives_what_torch_gives(mode: str, padding_idx: int | None) -> None:
    weight = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 2, 4], [2, 2, 2], [4, 4, 4], [1, 3, 0]])  # two bags hold nothing but padding, of one sign or the other
    found = embedding_bag(index, weight, mode=mode, padding_idx=padding_idx)
    wanted = F.embedding_bag(index, weight, mode=mode, padding_idx=padding_idx)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), weight), torch.autograd.grad(wanted.square().sum(), weight))


def test_rows_may_have_weights() -> None:
    weight = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64)
    index, shares = torch.randint(5, (3, 2), generator=GENERATOR), torch.rand(3, 2, generator=GENERATOR, dtype=torch.float64)
    torch.testing.assert_close(
        embedding_bag(index, weight, mode="sum", per_sample_weights=shares),
        F.embedding_bag(index, weight, mode="sum", per_sample_weights=shares),
    )


def test_bags_of_unequal_sizes_go_torchs_way() -> None:
    weight = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64)
    index, offsets = torch.tensor([0, 1, 4, 2, 3]), torch.tensor([0, 2, 2])
    torch.testing.assert_close(embedding_bag(index, weight, offsets), F.embedding_bag(index, weight, offsets))
