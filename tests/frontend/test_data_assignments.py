"""`x.data = y` in a model: averages of weights and centers of outputs, as on one device; what a copy would not mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshc
from tests.meaning.checks import step_means_itself


class Centered(nn.Module):
    """A center that follows what it is taken from; `how` sets it."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.up, self.how = nn.Linear(4, 6), how
        self.register_buffer("center", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        mean = h.detach().mean(0)
        if self.how == "shorter":
            self.center.data = mean[:3]
            return h
        out, seen = (h * self.center - self.center).square(), self.center.view(-1)
        if self.how == "used":
            self.center.data = mean
            mean += 1
        else:
            self.center.data = self.up.bias if self.how == "shared" else self.center * 0.9 + mean
        return out + seen if self.how == "viewed" else out


class Followed(nn.Module):
    """A network that follows another, as in MoCo and BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False)

    @torch.no_grad()
    def keys(self, x: Tensor) -> Tensor:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1
        return self.key(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.keys(x) * self.query(x)


@pytest.mark.parametrize("kind", [Centered, Followed])
def test_data_is_set_as_on_one_device(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    step_means_itself(kind(), {"x": torch.randn(6, 4)}, "dp=2,tp=2")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shared", "to the memory of another tensor that it holds"),
        ("used", "and goes on to use what it is set to"),
        ("viewed", "and goes on to use a view of what it was"),
        ("shorter", r"of a tensor, of shape \[6\], to one of shape \[3\]"),
    ],
)
def test_what_a_copy_would_not_mean_is_refused_with_its_line(how: str, said: str) -> None:
    with pytest.raises(meshc.CaptureError, match=said) as caught:
        meshc.compile(Centered(how), meshc.Mesh("dp=2"), args=(torch.randn(6, 4),))
    assert "test_data_assignments.py:" in str(caught.value) and "what to do:" in str(caught.value)
