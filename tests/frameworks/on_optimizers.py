"""Optimizers in a training step. Each function is a row: three steps on a mesh against the optimizer's own steps on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.optimization
from torch import nn

import meshc
from meshc.cost import devices
from tests.frameworks.rows import Check, Rows, refuses
from tests.optimizer.others import AdamW8bit, Lamb, ScheduleFree, Shampoo, SignInKernel, Soap, sign_state, sign_update
from tests.processes import optimizers, own_steps, train_step
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


def equal() -> nn.Module:
    """Four matrices of two shapes, of which each of two ranks can take one."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 8, bias=False), nn.GELU(), nn.Linear(8, 6, bias=False)) for _ in range(2)]
    return nn.Sequential(*layers).double()


def trains(mesh: Any, build: Build, within: float = 1e-9, options: Any = None) -> None:
    """Losses and parameters are those of the optimizer's own steps, up to `within`."""
    trained(mesh, model, 4, build, within, options)


def divides(mesh: Any, build: Build, within: float) -> None:
    """Likewise of equal matrices, each updated by one rank; messages take little, so that small ones are divided too."""
    with devices.assume_device(replace(devices.device("cpu"), collective_s=1e-6, inside_node=devices.Link(1e-6, 1e10))):
        program = trained(mesh, equal, 6, build, within)
    assert any("computations are divided over the ranks of tp" in note for note in program.compiled.notes), program.compiled.notes


def trained(
    mesh: Any, make: Callable[[], nn.Module], width: int, build: Build, within: float, options: Any = None
) -> meshc.Program:
    """The program of a model that gives so many values, compared."""
    ours = make()
    twin = copy.deepcopy(ours)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, width, dtype=torch.float64)
    step = meshc.TrainStep(ours, optimizer=build(ours.parameters()), loss=F.mse_loss)
    program = meshc.compile(step, mesh, args=(x,), kwargs={"target": y}, plan=SPLIT, options=options or meshc.Options())
    optimizer = build(twin.parameters())
    for _ in range(3):
        loss = F.mse_loss(twin(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(program(x, target=y), loss.detach(), rtol=within, atol=within)
    start = dict(make().named_parameters())
    state = program.state_dict(full=True)  # all ranks call it, rank 0 has it
    for name, value in state.get("model", {}).items():
        wanted = twin.get_parameter(name).detach()
        torch.testing.assert_close(value, wanted, rtol=within, atol=within)
        assert not torch.allclose(value, start[name].detach(), rtol=1e-3, atol=0)
    return program


ROWS.row("Adafactor of transformers, in a loop of one's own")(own_steps.adafactor)
ROWS.row("its other forms, and torch's, likewise")(own_steps.adafactor_elsewhere)
ROWS.row("Shampoo, SOAP, AdamW in blocks of 8 bits, a registered update, likewise")(own_steps.others)
ROWS.row("several, in lists and wrappers, with schedules", mesh="dp=2")(optimizers.trained)
ROWS.row("rates, betas, weight decay changed between steps", mesh="dp=2")(train_step.scheduled)


def _row(what: str, name: str, check: Check, **more: Any) -> None:
    check.__name__ = name
    ROWS.row(what, **more)(check)


for _what, _name, _build, _tried in (
    ("Adafactor of torch", "adafactor", lambda params: torch.optim.Adafactor(params, lr=1e-2), trains),
    ("Adafactor of transformers", "their_adafactor", lambda params: transformers.optimization.Adafactor(params, lr=None), trains),
    ("Muon of torch (whole matrices, each on one rank)", "muon", lambda params: torch.optim.Muon(params, lr=1e-2), divides),
    ("Shampoo (likewise)", "shampoo", Shampoo, divides),
    ("SOAP (likewise)", "soap", Soap, divides),
    ("Lion", "lion", Lion, trains),
    ("LAMB", "lamb", Lamb, trains),
    ("AdamW without a schedule (schedule-free)", "without_schedule", schedule_free, trains),
    ("AdamW in 8 bits, written in torch", "adamw_8bit", AdamW8bit, trains),
):
    _row(_what, _name, lambda mesh, build=_build, tried=_tried: tried(mesh, build, 1e-7 if build in (Shampoo, Soap) else 1e-9))


@ROWS.row("AdamW with its state in 8 bits, as far as 8 bits go", line='Options(training=Training(optimizer_state="8bit"))')
def state_in_8_bits(mesh: Any) -> None:
    trains(mesh, lambda params: torch.optim.AdamW(params, lr=1e-2), 2e-2, meshc.Options(training=meshc.Training(optimizer_state="8bit")))


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
