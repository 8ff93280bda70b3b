"""What torch.export holds is compiled as what it means: its mode, its sizes, its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from tests.broad import broad

X = torch.randn(4, 6, 8)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.up, self.down = (nn.Linear(8, 8) for _ in range(5))
        self.drop, self.norm = nn.Dropout(0.2), nn.LayerNorm(8)
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (layer(x).view(rows, length, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, 8)
        return self.down(self.drop(self.norm(self.up(x * self.scale + h).relu())))  # type: ignore[no-any-return]


def exported(model: nn.Module, **how: Any) -> Any:
    torch.manual_seed(0)
    return torch.export.export(model, (X,), **how)


@pytest.mark.parametrize("training", [True, broad(False)])
def test_a_program_and_its_module_are_what_they_mean(training: bool) -> None:
    found = exported(Attends().train(training))
    program = meshc.compile(found, meshc.Mesh("tp=2"), args=(X,))
    assert meshc.verify(program, (X,)).ok
    module = found.module()
    step = meshc.TrainStep(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), loss=F.mse_loss)
    trained = meshc.compile(step, meshc.Mesh("dp=2"), args=(X,), kwargs={"target": torch.randn(4, 6, 8)})
    assert meshc.verify(trained, dtype=torch.float64).ok
    assert ("meshc.dropout" in str(trained)) is training and "meshc.attention" in str(trained)


def test_a_program_brings_its_inputs() -> None:
    program = meshc.compile(exported(nn.Sequential(nn.Linear(8, 4))), meshc.Mesh("dp=2"))
    assert [port.shape for port in program.compiled.inputs if port.kind == "input"] == [(4, 6, 8)]
    assert meshc.verify(program).ok


def test_sizes_that_were_left_open_are_open_and_others_are_refused() -> None:
    rows = torch.export.Dim("rows", max=64)
    found = exported(Attends().eval(), dynamic_shapes={"x": {0: rows}})
    with torch.no_grad():
        program = meshc.compile(found, meshc.Mesh("dp=2"), args=(torch.randn(6, 6, 8),))
        assert meshc.verify(program, (torch.randn(6, 6, 8),)).ok
        with pytest.raises(meshc.InputError, match=r"x is torch.float32 of shape \[4, 5, 8\], and was torch.float32 of \['any', 6, 8\]"):
            meshc.compile(found, meshc.Mesh("dp=2"), args=(torch.randn(4, 5, 8),))
        with pytest.raises(meshc.InputError, match="x is torch.float64"):
            meshc.compile(found, meshc.Mesh("dp=2"), args=(X.double(),))


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.empty_like(x).exponential_(1.0)


class Casts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(y)
        return y + self.up(x)


@pytest.mark.parametrize("model, what", [(Draws(), "random numbers"), (Casts(), "a region|a call of submod")], ids=["draws", "region"])
def test_what_cannot_be_taken_from_a_graph_is_refused(model: nn.Module, what: str) -> None:
    with pytest.raises(meshc.CaptureError, match=what):
        meshc.compile(exported(model), meshc.Mesh("dp=2"), args=(X,))


def test_a_step_of_a_program_says_what_to_pass() -> None:
    found = exported(Attends())
    with pytest.raises(meshc.CaptureError, match=r"TrainStep\(exported.module\(\), ...\)"):
        meshc.TrainStep(found, optimizer=torch.optim.SGD(found.module().parameters(), lr=0.1))
