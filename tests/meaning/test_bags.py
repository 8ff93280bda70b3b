"""Bags of embeddings of unequal sizes: their kernel leaves out, or lays out otherwise, what only backward reads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshc


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, 8, mode=mode)
        self.out = nn.Linear(8, 4)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.out(self.table(words, offsets))


@pytest.mark.parametrize("mode, mesh", [("sum", "dp=2"), ("sum", "tp=2"), ("mean", "dp_shard=2"), ("max", "tp=2")])
def test_bags_of_unequal_sizes_train(mode: str, mesh: str) -> None:
    torch.manual_seed(0)
    model = Bags(mode).double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    given = torch.randint(0, 10, (9,)), torch.tensor([0, 2, 4, 7])
    assert meshc.verify(meshc.compile(step, meshc.Mesh(mesh), args=given), dtype=torch.float64).ok
