"""A model with two outputs, for backward from some of them: one has an infinite derivative where its input is zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TwoOutputs(nn.Module):
    """`length` [batch] is a square root, whose derivative at a row of zeros is infinite; `score` [batch, 4] is linear in the same features.

    `left` and `right` have the same gradient, `unused` has none, `scale` is behind `length` only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 12, bias=False)
        self.root = nn.Linear(12, 6, bias=False)
        self.head = nn.Linear(12, 4, bias=False)
        self.left, self.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.trunk(x))
        length = self.root(features).square().sum(-1).sqrt()
        return {"length": self.scale * length, "score": self.head(features) + self.left + self.right}


def two_outputs(rows: int = 6, zero_row: bool = True) -> tuple[TwoOutputs, Tensor]:
    """The model in float64, and inputs [rows, 8]; with `zero_row` the second row is zero."""
    torch.manual_seed(5)
    model = TwoOutputs().double()
    x = torch.randn(rows, 8, dtype=torch.float64)
    if zero_row:
        x[1] = 0
    return model, x
