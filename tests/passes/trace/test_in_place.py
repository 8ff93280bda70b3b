"""What models change in place: a result that backward reads again, places that a mask chooses, and what torch itself refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshc
from tests.asserting import AssertsNumbers
from tests.broad import broad


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.row = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def heads(self, x: Tensor) -> Tensor:
        return self.linear(x).unflatten(-1, (2, 4)).transpose(1, 2)


class AddsBehind(Base):
    """To the result of attention that is written out, as Nystromformer does; a product does not need its result in backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.heads(x)
        out = torch.softmax(h @ h.transpose(-2, -1), -1) @ h
        out += h
        return out * 2


class AddsThroughAView(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = self.heads(x)
        out = torch.softmax(h @ h.transpose(-2, -1), -1) @ h
        out.transpose(1, 2).mul_(3.0)
        return out * 2


class ChangesACopy(Base):
    """Which would be a view of a result that lies otherwise."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.heads(x)
        out = torch.softmax(h @ h.transpose(-2, -1), -1) @ h
        out.transpose(1, 2).flatten(0, 1).mul_(3.0)
        return out * 2


class WritesARow(Base):
    """To the places that a mask chooses, as T5Gemma 2 does: of its gradient nobody knows beforehand how many rows it sums."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h[x[..., 0] > 0] = self.row
        return h * 2


@pytest.mark.filterwarnings("ignore:the model's code asserts")
@pytest.mark.parametrize("make", [AddsBehind, WritesARow, AssertsNumbers, broad(AddsThroughAView), broad(ChangesACopy)])
def test_what_torch_takes_is_taken(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out, target: (out * target).sum())
    x = torch.randn(4, 6, 8)
    with torch.no_grad():
        target = torch.randn_like(model(x))
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=(x,), kwargs={"target": target})
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


class Changes(Base):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.exp(self.linear(x))
        kept += 1
        return kept


class Number(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * math.exp(x.max().item())


@pytest.mark.parametrize(
    "make, words",
    [
        (Changes, r"(?s)shape \[4, 8\] in place that backward reads\n.*test_in_place.py:\d+ `kept \+= 1`.*what to do: make a new tensor"),
        (Number, r"(?s)cannot be traced.*test_in_place.py:\d+ in forward\n.*what to do: keep it a tensor"),
    ],
)
def test_what_torch_or_a_program_refuses_is_named_by_line(make: type[Base], words: str) -> None:
    model = make()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=F.mse_loss)
    inputs: dict[str, Any] = {"args": (torch.randn(4, 8),), "kwargs": {"target": torch.randn(4, 8)}}
    with pytest.raises(meshc.CaptureError, match=words):
        meshc.compile(step, meshc.Mesh("dp=2"), **inputs)


class Least(Base):
    """Fills with the least number of its dtype, in torch's default one, as XGLM does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.max(h, torch.full((), torch.finfo(h.dtype).min, device=h.device))


def test_the_least_number_of_a_copy_in_double_precision() -> None:
    program = meshc.compile(Least(), meshc.Mesh("dp=2"), args=(torch.randn(4, 8),))
    assert meshc.verify(program).ok and meshc.verify(program, dtype=torch.float64).ok
