"""Experts whose weights a model stacks and multiplies itself: what their dim is called, and a step that splits it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.ir import spmd
from tests.broad import broad

EXPERTS, WIDTH, HIDDEN = 4, 8, 12


class Stacked(nn.Module):
    """Every expert on all tokens, by gates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.w1, self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN)), nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        hidden = torch.einsum("th,ehf->etf", x, self.w1).relu()
        made = torch.einsum("etf,efh->eth", hidden, self.w2)
        return x + torch.einsum("eth,te->th", made, self.gate(x).softmax(-1))


class Blocks(nn.Module):
    """A matrix for each part of a row: no router, and no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("teh,ehf->tef", x.view(-1, EXPERTS, WIDTH), self.w).flatten(1)


def trained(mesh: str, plan: str | None = None) -> meshc.Program:
    model = Stacked().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean(), clip_grad_norm=1.0)
    return meshc.compile(step, meshc.Mesh(mesh), plan=plan, args=(torch.randn(12, WIDTH, dtype=torch.float64),))


def test_the_dim_of_the_stack_is_experts() -> None:
    found = trained("ep=2").compiled
    lies = {name: str(found.port(f"parameter:{name}").sharding) for name in ("w1", "w2", "first.weight")}
    assert lies["w1"].startswith("[experts 4/ep, ") and lies["w2"].startswith("[experts 4/ep, ") and "/ep" not in lies["first.weight"]
    gathered = [node for stage in found.stages.values() for node in stage.graph.nodes if node.target is spmd.all_gather]
    assert all(tuple(node.meta["meshc"].shape)[:1] != (EXPERTS,) for node in gathered)  # no weight of an expert travels


@pytest.mark.parametrize("mesh", ["ep=2", broad("ep=3"), broad("ep=4"), broad("dp=2,ep=2"), broad("ep=2,tp=2"), broad("dp_shard=2,ep=2")])
def test_a_step_that_splits_it_equals_one_device(mesh: str) -> None:
    assert meshc.verify(trained(mesh), dtype=torch.float64).ok


def test_a_stack_without_a_router_is_none() -> None:
    with pytest.raises(meshc.PlanError, match="the model has no routed experts there"):
        meshc.compile(Blocks(), meshc.Mesh("ep=2"), args=(torch.randn(6, EXPERTS * WIDTH),))
