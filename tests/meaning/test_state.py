"""What a model keeps: buffers that it changes, weights that it shares, freezes, does not use or uses twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.errors import CaptureError
from tests.broad import broad
from tests.meaning.checks import MESHES, calls_alike, module_means_itself, step_means_itself

X = {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(1))}


class Statistics(nn.Module):
    """A counter, a running mean, a ring of past values written at a fixed row and through a view, a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("ring", torch.zeros(4, 8))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.count += 1
        self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.ring[1] = h.detach().sum(0)
        self.ring.view(4, 4, 2)[:, :, 1].add_(1)
        self.seen[0] = True
        return h - self.mean + self.ring.sum(0)


class Ring(nn.Module):
    """A ring buffer whose place is a counter that the model itself advances."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        self.ring.index_copy_(0, (self.at % 3).view(1), h.detach().mean(0, keepdim=True))
        self.at.add_(1)
        return h + self.ring.sum(0)


class Norms(nn.Module):
    """Running statistics of batch norm, which ranks with one row and with two share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x))))


@pytest.mark.parametrize("mesh", [broad(MESHES[0]), MESHES[1]])
@pytest.mark.parametrize("make", [Statistics, Ring, Norms])
def test_buffers_are_changed_as_on_one_device(make: type[nn.Module], mesh: str) -> None:
    torch.manual_seed(0)
    program = module_means_itself(make(), X, mesh)
    assert sum(port.kind == "buffer" for port in program.compiled.outputs) == {Statistics: 4, Ring: 2, Norms: 3}[make]
    module_means_itself(make(), X, mesh, grad=False)
    step_means_itself(make(), X, mesh)


@pytest.mark.parametrize("make", [Statistics, Ring, Norms])
def test_buffers_go_on_from_call_to_call(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    calls_alike(model, X, calls=5)
    if make is Statistics:
        assert model.count == 5 and model.seen.tolist() == [True, False, False]
    if make is Ring:
        assert model.at == 5 and (model.ring != 0).any(1).all()


def test_a_layer_in_evaluation_stays_so_while_the_rest_trains() -> None:
    """A norm that fine-tuning freezes: its statistics are read, not made, and compiling changes no flag of the user's model."""
    torch.manual_seed(0)
    model = Norms().train()
    model.norm.eval()
    model.norm.running_mean.fill_(3.0)
    program = module_means_itself(model, X, "dp=4")
    assert [child.training for child in model.modules()] == [True, True, False, True]
    assert not any(port.kind == "buffer" for port in program.compiled.outputs)
    calls_alike(model, X)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(13, 8), nn.LayerNorm(8), nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


@pytest.mark.parametrize("mesh,plan", [("dp=2,tp=2", "fsdp+megatron"), ("dp=2", "zero2"), broad("tp=4", "megatron"), broad("dp=3", "fsdp")])
def test_an_embedding_that_is_the_head(mesh: str, plan: str) -> None:
    torch.manual_seed(0)
    ids = {"ids": torch.randint(13, (7, 5))}
    program = step_means_itself(Tied(), ids, mesh, plan)
    assert [port.name for port in program.compiled.inputs if port.kind == "parameter"].count("embedding.weight") == 1
    assert "head.weight" not in {port.name for port in program.compiled.inputs}
    if plan != "zero2":
        module_means_itself(Tied(), ids, mesh, plan)


class Partly(nn.Module):
    """`frozen` takes no gradient, `unused` is never read, `twice` is used twice, `dead` is read where no gradient comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.twice, self.unused, self.dead = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(6, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(F.gelu(self.twice(self.frozen(x))))
        return h + self.dead(x).detach()


@pytest.mark.parametrize("mesh", [broad(MESHES[0]), MESHES[1]])
def test_frozen_unused_and_twice_used_parameters(mesh: str) -> None:
    torch.manual_seed(0)
    module_means_itself(Partly(), X, mesh)
    program = step_means_itself(Partly(), X, mesh, "fsdp" if mesh == "dp=4" else None)
    given = {port.name for port in program.compiled.outputs if port.kind == "parameter"}
    assert given == {"twice.weight", "twice.bias"}


def test_parameters_without_a_gradient_have_none() -> None:
    torch.manual_seed(0)
    model = Partly()
    calls_alike(model, X)
    assert all(p.grad is None for part in (model.frozen, model.unused, model.dead) for p in part.parameters())
    assert all(p.grad is not None for p in model.twice.parameters())


class LoRA(nn.Module):
    """A frozen layer, and a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) / rank)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(self.drop(x), self.down), self.up)


@pytest.mark.parametrize("mesh,plan", [("dp=2,tp=2", None), broad("dp=3", "fsdp"), broad("tp=4", "megatron")])
def test_adapters_train_and_their_base_does_not(mesh: str, plan: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(6, 16), 3), nn.GELU(), LoRA(nn.Linear(16, 6), 3))
    inputs = {"input": X["x"]}
    program = step_means_itself(model, inputs, mesh, plan)
    assert {port.name.rsplit(".")[-1] for port in program.compiled.outputs if port.kind == "parameter"} == {"down", "up"}
    assert not any(".base." in port.of for port in program.compiled.inputs if port.kind == "state")
    module_means_itself(model, inputs, mesh, plan)


class ChangesParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return self.linear(x)


def test_a_parameter_changed_in_place_is_refused_where_it_is_differentiated() -> None:
    with pytest.raises(meshc.CaptureError, match="changes its parameter linear.weight in place while it is differentiated"):
        meshc.compile(ChangesParameter(), meshc.Mesh("dp=2"), kwargs=X)
    model = ChangesParameter()
    calls_alike(model, X, grad=False)


class Holding(nn.Module):
    """A tensor that is neither parameter nor buffer; `how` changes it."""

    def __init__(self, how: Callable[[Tensor], Any] = lambda held: None) -> None:
        super().__init__()
        self.layer, self.held, self.how = nn.Linear(6, 5), torch.arange(1.0, 6.0), how

    def forward(self, x: Tensor) -> Tensor:
        self.how(self.held)
        return self.layer(x) * self.held


def test_a_tensor_that_is_held_is_a_constant() -> None:
    program = module_means_itself(Holding(), {"x": torch.randn(7, 6)}, "dp=2,tp=3")
    assert [port.shape for port in program.compiled.inputs if port.kind == "constant"] == [(5,)]
    calls_alike(Holding(), {"x": torch.randn(7, 6)})
    with pytest.raises(CaptureError, match="neither its parameter nor its buffer.*\n.*register_buffer"):
        meshc.compile(Holding(lambda held: held.add_(1.0)), meshc.Mesh("dp=2"), kwargs={"x": torch.randn(7, 6)})
