"""A model with assertions, in a file whose `assert` statements pytest leaves as they are."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import Tensor, nn


class Asserts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def block(self, x: Tensor) -> Tensor:
        torch._assert_async(torch.isfinite(x).all(), "within a checkpointed region")
        return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 4, "a size is known when the model is traced, and checked then"
        assert (x > -1000).all(), "x is too small"
        result: Tensor = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return result


class AssertsNumbers(nn.Module):
    """Of numbers that a tensor holds, which decide nothing, as XLM and ProphetNet do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        assert torch.all(x > -1000).item(), "too small"
        assert x.abs().argmax().item() < 1000
        result: Tensor = self.linear(x)
        return result
