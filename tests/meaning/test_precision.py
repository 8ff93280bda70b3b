"""Regions of mixed precision inside a model, and models in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshc

BF16 = torch.bfloat16


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", BF16):
            h = self.a(x)
            with torch.autocast("cpu", enabled=False):
                wide = self.b(h.float())
        return h, wide


@pytest.mark.parametrize("mesh", ["dp=4", "tp=3"])
def test_autocast_inside_a_model(mesh: str) -> None:
    """A gradient that four ranks sum in bfloat16 differs from one device's by its rounding; what is only cast is held to float32."""
    torch.manual_seed(0)
    x = torch.randn(7, 6)
    program = meshc.compile(Regions(), meshc.Mesh(mesh), kwargs={"x": x})
    dtypes = {port.name: port.dtype for port in program.compiled.outputs if port.kind == "output"}
    assert dtypes == {"0": BF16, "1": torch.float32}
    assert meshc.verify(program).tolerance == 2e-2
    with torch.no_grad():
        assert meshc.verify(meshc.compile(Regions(), meshc.Mesh(mesh), kwargs={"x": x})).ok


class OnlyCast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x).to(BF16)


def test_a_cast_alone_does_not_loosen_the_comparison() -> None:
    torch.manual_seed(0)
    assert meshc.verify(meshc.compile(OnlyCast(), meshc.Mesh("tp=2"), kwargs={"x": torch.randn(7, 6)})).tolerance == 1e-5


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("mesh", ["dp=4", "tp=3"])
def test_models_in_16_bits(mesh: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 5)).to(dtype)
    program = meshc.compile(model, meshc.Mesh(mesh), kwargs={"input": torch.randn(7, 6).to(dtype)})
    assert meshc.verify(program).ok
    assert {port.dtype for port in program.compiled.outputs} == {dtype}
