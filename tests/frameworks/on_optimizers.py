"""Optimizers in a training step. Each function is a row: three steps on a mesh against the optimizer's own steps on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.optimization
from torch import nn

import meshc
from tests.frameworks.rows import Check, Rows, refuses
from tests.optimizer.others import AdamW8bit, Lamb, ScheduleFree, Shampoo, SignInKernel, Soap, sign_state, sign_update
from tests.processes import optimizers, train_step
from tests.processes.session import run_checks

ROWS = Rows("optimizers")
SPLIT = "tp: ffn; store params, grads, state"
Build = Callable[[Any], torch.optim.Optimizer]


class Lion(torch.optim.Optimizer):
    """As its paper has it (Chen et al., arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.lerp(p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


def schedule_free(params: Any) -> torch.optim.Optimizer:
    optimizer = ScheduleFree(params)
    optimizer.train()
    return optimizer


def registered(params: Any) -> torch.optim.Optimizer:
    meshc.register_update(SignInKernel, sign_update, sign_state)
    return SignInKernel(params)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 4, bias=False)).double()


def trains(mesh: Any, build: Build, within: float = 1e-9, options: Any = None) -> None:
    """Losses and parameters are those of the optimizer's own steps, up to `within`."""
    ours = model()
    twin = copy.deepcopy(ours)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    step = meshc.TrainStep(ours, optimizer=build(ours.parameters()), loss=F.mse_loss)
    program = meshc.compile(step, mesh, args=(x,), kwargs={"target": y}, plan=SPLIT, options=options or meshc.Options())
    optimizer = build(twin.parameters())
    for _ in range(3):
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(program(x, target=y), loss.detach(), rtol=within, atol=within)
    start = dict(model().named_parameters())
    state = program.state_dict(full=True)  # all ranks call it, rank 0 has it
    for name, value in state.get("model", {}).items():
        wanted = twin.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=within, atol=within)
        assert not torch.allclose(value, start[name].detach(), rtol=1e-3, atol=0)


ROWS.row("several, in lists and wrappers, with schedules", mesh="dp=2")(optimizers.trained)
ROWS.row("rates, betas, weight decay changed between steps", mesh="dp=2")(train_step.scheduled)


def _row(what: str, name: str, check: Check, **more: Any) -> None:
    check.__name__ = name
    ROWS.row(what, **more)(check)


for _what, _name, _build in (
    ("Adafactor of torch", "adafactor", lambda params: torch.optim.Adafactor(params, lr=1e-2)),
    ("Adafactor of transformers", "their_adafactor", lambda params: transformers.optimization.Adafactor(params, lr=None)),
    ("Muon of torch (whole matrices, on every rank)", "muon", lambda params: torch.optim.Muon(params, lr=1e-2)),
    ("Shampoo (likewise)", "shampoo", Shampoo),
    ("SOAP (likewise)", "soap", Soap),
    ("Lion", "lion", Lion),
    ("LAMB", "lamb", Lamb),
    ("AdamW without a schedule (schedule-free)", "without_schedule", schedule_free),
    ("AdamW in 8 bits, written in torch", "adamw_8bit", AdamW8bit),
):
    _row(_what, _name, lambda mesh, build=_build: trains(mesh, build, 1e-7 if build in (Shampoo, Soap) else 1e-9))


@ROWS.row("AdamW with its state in 8 bits, as far as 8 bits go", line='Options(optimizer_state="8bit")')
def state_in_8_bits(mesh: Any) -> None:
    trains(mesh, lambda params: torch.optim.AdamW(params, lr=1e-2), 2e-2, meshc.Options(optimizer_state="8bit"))


@ROWS.row("an optimizer whose step is another library's kernel", line="meshc.register_update(Class, update, state)")
def in_a_kernel(mesh: Any) -> None:
    with pytest.raises(meshc.CompileError):
        trains(mesh, SignInKernel)
    trains(mesh, registered)


@ROWS.row("LBFGS, whose step takes a closure", refused="an optimizer that steps without one")
def closures(mesh: Any) -> None:
    refuses(meshc.CompileError, "LBFGS", lambda: trains(mesh, torch.optim.LBFGS))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
