"""Optimizers of papers and of other libraries, and updates that are registered: on simulated ranks, in float64, against their own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.optimization import Adafactor

import meshc
from meshc import artifact
from meshc.optimizer import optimizer as mo
from meshc.optimizer import registered_updates
from tests.broad import broad
from tests.optimizer.others import AdamW8bit, Lamb, ScheduleFree, Shampoo, SignInKernel, Soap, sign_state, sign_update
from tests.optimizer.stepped import run

Build = Callable[[Any], torch.optim.Optimizer]


def trained(params: Any) -> torch.optim.Optimizer:
    optimizer = ScheduleFree(params)
    optimizer.train()
    return optimizer


OTHERS: dict[str, Build] = {
    "schedule-free": trained,
    "transformers' Adafactor": lambda params: Adafactor(params, lr=None, warmup_init=True, weight_decay=0.1),  # at a rate that is data
    "Adafactor with a rate": lambda params: Adafactor(params, lr=1e-2, scale_parameter=False, relative_step=False, beta1=0.9),
    "registered": SignInKernel,
    "8 bits": AdamW8bit,
    "LAMB": Lamb,
    "Shampoo": Shampoo,
    "SOAP": Soap,
}


@pytest.fixture
def known() -> Iterator[None]:
    meshc.register_update(SignInKernel, sign_update, sign_state)
    yield
    del registered_updates.UPDATES[SignInKernel]


class Branches(nn.Module):
    """A matrix and a bias for each optimizer, whose results are summed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.ModuleList(nn.Linear(6, 8) for _ in range(count)), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(sum((up(x) for up in self.up), torch.zeros(()))))


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["schedule-free", "transformers' Adafactor", "registered"], id="three"),
        broad(["Adafactor with a rate", "8 bits", "LAMB"], id="three more"), broad(["Shampoo", "SOAP"], id="of whole matrices"),
    ],
)  # fmt: skip
def test_equals_one_device(names: list[str], known: None, tmp_path: Path) -> None:
    """All at once, each with parameters of its own, which are split, with their gradients and their state, over both axes."""
    model = Branches(len(names)).double()
    optimizers = [OTHERS[name](list(up.parameters())) for name, up in zip(names, model.up, strict=True)]
    step = meshc.TrainStep(model, optimizer=optimizers, loss=F.mse_loss)
    inputs = (torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    plan = "dp: batch; store params, grads, state\ntp: ffn; store params, grads, state"
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), args=inputs, plan=plan)
    report = meshc.verify(program, dtype=torch.float64)
    errors = [(error, name) for kind, name, error in report.rows if kind.startswith("parameter after step")]
    assert len(errors) == 3 * 2 * len(names) and max(errors)[0] < 1e-9, max(errors)
    program.save(tmp_path / "saved")
    assert artifact.load(tmp_path / "saved").outputs


def test_what_a_group_counts_is_state_of_its_parameters() -> None:
    model = nn.Linear(3, 4).double()
    optimizer = ScheduleFree(model.parameters(), warmup_steps=3)
    optimizer.train()
    spec = mo.describe(optimizer)
    slots = {slot.name: slot.fill for slot in spec.slots_of(model.weight)}
    assert {name: fill for name, fill in slots.items() if name.startswith("meshc.group.")} == {
        "meshc.group.k": 0.0, "meshc.group.lr_max": -1.0, "meshc.group.scheduled_lr": 0.0, "meshc.group.weight_sum": 0.0,
    }  # fmt: skip
    assert "k" not in spec.groups[0].numbers and {"lr", "betas_0", "warmup_steps"} <= {*spec.groups[0].numbers}
    assert optimizer.param_groups[0]["k"] == 0 and not any(optimizer.state.values())


def test_evaluation_mode_of_an_optimizer_is_said() -> None:
    with pytest.raises(meshc.CompileError, match=r"ScheduleFree could not take a step on its own: .*insert .train\(\)"):
        mo.describe(ScheduleFree(nn.Linear(3, 4).parameters()))


@pytest.mark.parametrize("name", ["registered", "8 bits", "LAMB"])
def test_steps_equal_its_own(name: str, known: None) -> None:
    """Five steps under a schedule that never compiles again."""
    model = nn.Linear(4, 8).double()
    optimizer = OTHERS[name](model.parameters())
    spec = mo.describe(optimizer)

    def change(step: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.8
        assert spec.key_of(optimizer) == spec.key

    run(optimizer, steps=5, change=change)


def test_without_its_update_it_is_refused() -> None:
    with pytest.raises(meshc.CompileError, match="SignInKernel"):
        mo.describe(SignInKernel(nn.Linear(3, 4).parameters()))
    assert mo.describe(torch.optim.SGD(nn.Linear(3, 4).parameters(), lr=0.1)).groups[0].kind == "sgd"
    with pytest.raises(meshc.StateError, match="an update is registered for a class of optimizers"):
        meshc.register_update(SignInKernel([nn.Parameter(torch.zeros(2))]), sign_update)  # type: ignore[arg-type]


def test_a_wrong_update_is_found_by_verify(known: None) -> None:
    meshc.register_update(SignInKernel, lambda p, g, state, group: (p - 2 * group["lr"] * g, dict(state)), sign_state)
    model = Branches(1).double()
    step = meshc.TrainStep(model, optimizer=SignInKernel(model.parameters()), loss=F.mse_loss)
    inputs = (torch.randn(6, 6, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))
    program = meshc.compile(step, meshc.Mesh("dp=2"), args=inputs)
    with pytest.raises(meshc.VerifyError, match="does not mean what the model means"):
        meshc.verify(program, dtype=torch.float64)
