"""Optimizers derived from torch's, whose `step` calls `super().step()`: against their own steps, and what of them cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshc
from meshc.optimizer import optimizer as mo
from tests.broad import broad
from tests.optimizer.derived import Averages, Bounded, Cautious, Clips, CountsInItself, Halves, HalvesAgain, Rows, Skips, Warms
from tests.optimizer.stepped import SHAPES, parameters, run

Build = Callable[..., torch.optim.Optimizer]

DERIVED: list[Build] = [Halves, HalvesAgain, Bounded, Averages, Cautious, Warms, Rows]


@pytest.fixture(autouse=True)
def _bases_have_been_used() -> None:
    """torch wraps the `step` of a class when the first optimizer of it is made, and `super().step()` runs what it has wrapped."""
    for kind in (Halves, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor):
        kind(parameters(((2,),)), lr=0.1)
        assert vars(kind.step)["hooked"]


@pytest.mark.parametrize("kind", [*DERIVED[:-1], broad(Rows)])
def test_steps_equal_its_own(kind: Build) -> None:
    optimizer = kind(parameters(SHAPES[:2]), lr=0.05)
    shadow = run(optimizer, steps=5)
    assert shadow.spec.groups[0].kind == "other"
    targets = {str(node.target) for traced in shadow.spec.groups[0].traced.values() for node in traced.graph.graph.nodes}
    assert not any("profiler" in target for target in targets)  # torch's own wrapper records each step


@pytest.mark.parametrize("kinds", [broad([Halves, Averages], id="two"), broad(DERIVED, id="all")])
def test_on_a_mesh(kinds: list[Build]) -> None:
    """All at once, each with parameters of its own, split over both axes with their state."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.ModuleList(nn.Linear(6, 8) for _ in kinds), nn.Linear(8, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.gelu(sum((up(x) for up in self.up), torch.zeros(()))))

    model = Branches().double()
    optimizers: list[Any] = [kind(up.parameters(), lr=0.05) for kind, up in zip(kinds, model.up, strict=True)]
    step = meshc.TrainStep(model, optimizer=optimizers, loss=F.mse_loss)
    inputs = (torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    plan = "dp: batch; store params, grads, state\ntp: ffn; store params, grads, state"
    report = meshc.verify(meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=inputs, plan=plan), dtype=torch.float64)
    errors = [(error, name) for kind, name, error in report.rows if kind.startswith("parameter after step")]
    assert len(errors) == 3 * 2 * len(kinds) and max(errors)[0] < 1e-9, max(errors)


@pytest.mark.parametrize(
    "kind, words",
    [
        (Clips, r"(?s)Clips: after three steps .* differs by .*TrainStep\(clip_grad_norm=...\)"),
        (Skips, r"(?s)Skips.step leaves out .* where the gradient of another is not finite.*what to do"),
        (CountsInItself, r"(?s)CountsInItself.step changes self.count.*group\['count'\]"),
    ],
)
def test_what_a_step_cannot_do(kind: Build, words: str) -> None:
    optimizer = kind(parameters(SHAPES[:2]), lr=0.05)
    with pytest.raises(meshc.CompileError, match=words):
        mo.describe(optimizer)
    assert not optimizer.state


class Beside(torch.optim.AdamW):
    """Of its own what is no matrix, and another for those."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__([p for p in model.parameters() if p.dim() != 2])
        self.muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])

    def step(self, closure: Any = None) -> Any:
        self.muon.step()
        return super().step(closure)


def test_a_step_of_the_base_beside_others_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(meshc.CompileError, match=r"(?s)Beside.step writes to .*call self.rest.step\(\)"):
        meshc.TrainStep(model, optimizer=Beside(model), loss=F.mse_loss)


class HalvesAllButTheFirst(torch.optim.AdamW):
    """Half a gradient moves a parameter as the whole does: its state alone tells."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"][1:]:
                p.grad.mul_(0.5)
        return super().step(closure)


def test_state_that_differs_is_found() -> None:
    with pytest.raises(meshc.CompileError, match=r"where the largest number of state\['exp_avg'\] is"):
        mo.describe(HalvesAllButTheFirst(parameters(SHAPES[:2]), lr=0.05))
