"""Attention with sinks that a model writes out becomes one call; what looks like it, and is not, stays."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.broad import broad
from tests.passes.stepped import around, changed


class Writes(nn.Module):
    """gpt-oss's way, and ways that differ from it by one thing."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        self.sinks, self.how = nn.Parameter(torch.zeros(2)), how

    def forward(self, x: Tensor, mask: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores = torch.matmul(x, x.transpose(2, 3)) * 0.5 + mask
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[2], -1)
        combined = torch.cat([sinks, scores] if self.how.get("first") else [scores, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        weights = F.softmax(combined, dim=2 if self.how.get("other") else -1, dtype=combined.dtype)
        weights = weights[..., 1:] if self.how.get("first") else weights[..., :-1]
        weights = F.dropout(weights, p=float(bool(self.how.get("drops"))) / 4)
        if self.how.get("twice"):
            weights = weights * 2
        mixed = torch.matmul(weights, x)
        return (mixed, weights) if self.how.get("shows") else mixed


def raised(model: nn.Module) -> str:
    inputs = {"x": torch.zeros(4, 2, 8, 3), "mask": torch.zeros(4, 1, 8, 8)}
    with torch.no_grad():
        return changed(*around("raise", model, "dp=2", **inputs))


def test_the_whole_becomes_one_call() -> None:
    text = raised(Writes())
    made, _returned = [line for line in text.splitlines() if line.startswith("+")]
    assert "meshc.ops.attention_sinks.sink_attention(" in made and made.endswith("0.5)")
    gone = [line for line in text.splitlines() if line.startswith("-")]
    assert all(any(word in line for line in gone) for word in ("matmul", "softmax", "torch.cat", ".max("))


@pytest.mark.parametrize("how", ["first", "shows", *map(broad, ("other", "drops", "twice"))])
def test_what_is_something_else_stays(how: str) -> None:
    """A sink before the scores; weights along another dim, dropped, doubled, or returned."""
    assert "sink_attention" not in raised(Writes(**{how: True}))
