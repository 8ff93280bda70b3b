"""A load-balancing loss over microbatches: products of means over the batch, and their gradients, are those of the whole batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshc
from meshc.program.program import PlainProgram
from tests.broad import broad
from tests.zoo.experts import FAMILIES, shallow


class Routed(nn.Module):
    """A gate whose choices scale a hidden layer, with the two losses that routers have: of balance, and of the size of logits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.inner, self.down = nn.Linear(6, 8), nn.Linear(8, 4, bias=False), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        logits = self.gate(h)
        likely = logits.softmax(-1)
        chosen = F.one_hot(likely.argmax(-1), 4).to(likely.dtype)
        balance = 4 * (chosen.mean(0) * likely.mean(0)).sum()
        h = torch.tanh(self.inner(h) * likely.amax(-1, keepdim=True))
        return self.down(h), 0.3 * balance + 0.1 * logits.logsumexp(-1).square().mean()


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0], target) + output[1]


def compiled(mesh: str, microbatches: int, **options: Any) -> meshc.Program:
    model = Routed().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=loss, clip_grad_norm=1.0, microbatches=microbatches)
    torch.manual_seed(1)
    examples = {"args": (torch.randn(8, 6).double(),), "kwargs": {"target": torch.randint(5, (8,))}}
    return meshc.compile(step, meshc.Mesh(mesh), options=meshc.Options(**options), **examples)


CELLS = [("dp=2", 2), ("pp=2", 4), broad("dp=1", 4), broad("dp=2", 4), broad("pp=2,dp=2", 2)]


@pytest.mark.parametrize("mesh, microbatches", CELLS)
def test_means_in_a_product_equal_one_device(mesh: str, microbatches: int) -> None:
    verified = meshc.verify(compiled(mesh, microbatches), dtype=torch.float64)
    assert verified.ok, verified


def test_forward_of_all_microbatches_comes_before_the_first_backward() -> None:
    found = compiled("dp=2", 2).compiled
    assert isinstance(found, PlainProgram)
    runs = [(step.stage, step.microbatch) for step in found.schedule if step.op == "run" and step.stage in ("first", "each")]
    assert runs == [("first", 0), ("first", 1), ("each", 0), ("each", 1)]
    sums = [key for key in found.stages["each"].inputs if key.startswith("sum:")]
    assert len(sums) == 2  # of choices, which the gradient of the other mean is; and of that, for the loss, which is added up with the rest
    assert [key.replace("part:", "sum:") for key in found.stages["first"].outputs] == sums


def test_a_schedule_that_runs_a_backward_earlier_is_refused() -> None:
    with pytest.raises(meshc.MeshcError, match=re.escape("1f1b: backward reads sums over the whole batch")) as raised:
        compiled("pp=2", 4, schedule="1f1b")
    assert 'what to do: Options(pipeline=Pipelining(schedule="gpipe"))' in str(raised.value)


@pytest.mark.parametrize("mesh", [broad("pp=2"), broad("ep=2"), broad("pp=2,ep=2"), broad("ep=4")])
def test_a_stock_auxiliary_loss_equals_one_device(mesh: str) -> None:
    """Along `ep` choices are gathered: those of one microbatch, whose rows stand together where `ep` splits them within it."""
    found = shallow("mixtral") if mesh == "ep=2" else FAMILIES["mixtral"].case("mixtral")
    assert found.model.config.output_router_logits  # type: ignore[union-attr]
    found.kwargs = {name: torch.cat([value, value.flip(0)]) for name, value in found.kwargs.items()}
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(found.model, optimizer=optimizer, loss=lambda output: output.loss, clip_grad_norm=1.0, microbatches=2)
    options = meshc.Options(pipeline=meshc.Pipelining(schedule="gpipe")) if "pp" in mesh else meshc.Options()
    verified = meshc.verify(meshc.compile(step, meshc.Mesh(mesh), options=options, kwargs=found.call_kwargs), dtype=torch.float64)
    assert verified.ok, verified
