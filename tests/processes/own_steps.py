"""Optimizers that step a compiled module's parameters themselves, and whose own code cannot take DTensors. Each function is one check."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.optimization import Adafactor

import meshc
from tests.optimizer.derived import Averages, Bounded, Cautious, Clips, Halves, HalvesAgain, Rows, Skips, Warms
from tests.optimizer.others import AdamW8bit, Shampoo, SignInKernel, Soap, sign_state, sign_update
from tests.processes.reference import close
from tests.processes.session import run_checks

Build = Callable[[Any], torch.optim.Optimizer]


def their_adafactor(params: Any) -> torch.optim.Optimizer:
    """As it is by default: rates by step, scaled by the parameter's size."""
    return Adafactor(params, lr=None, warmup_init=True)


def as_the_trainer_has_it(params: Any) -> torch.optim.Optimizer:
    return Adafactor(params, lr=1e-2, scale_parameter=False, relative_step=False, beta1=0.9, weight_decay=0.1)


def adafactor_of_torch(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2, weight_decay=0.1)


def registered(params: Any) -> torch.optim.Optimizer:
    meshc.register_update(SignInKernel, sign_update, sign_state)
    return SignInKernel(params)


class Pair:
    """A model of matrices that are split by rows and by columns, unevenly on two ranks, compiled; and its twin on one device."""

    def __init__(self, mesh: Any, build: Build, width: int = 7) -> None:
        torch.manual_seed(0)
        self.mine = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 4, bias=False)).double()
        self.twin, self.start = copy.deepcopy(self.mine), copy.deepcopy(self.mine)
        self.x, self.y = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
        self.program = meshc.compile(self.mine, mesh, args=(self.x,))
        self.mine_steps, self.twin_steps = build(self.mine.parameters()), build(self.twin.parameters())

    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.mine, self.mine_steps), (self.twin, self.twin_steps)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for model, optimizer in self.both():
                optimizer.zero_grad()
                F.mse_loss(model(self.x), self.y).backward()
                optimizer.step()

    def state(self, name: str) -> dict[str, Any]:
        return self.mine_steps.state[self.mine.get_parameter(name)]

    def same(self, within: float = 1e-12) -> None:
        for name, parameter in self.mine.named_parameters():
            wanted = self.twin.get_parameter(name).detach()
            assert isinstance(parameter, DTensor)
            torch.testing.assert_close(parameter.full_tensor().detach(), wanted, rtol=within, atol=within)
            assert not torch.equal(wanted, self.start.get_parameter(name)), name


def adafactor(mesh: Any) -> None:
    """Of transformers: rows and columns of its second moments lie as the matrix does; what one device has saved is gone on from."""
    pair = Pair(mesh, their_adafactor)
    pair.train(2)
    pair.same()
    for name in ("0.weight", "2.weight"):
        weight: Any = pair.mine.get_parameter(name)
        for entry, dim in (("exp_avg_sq_row", 0), ("exp_avg_sq_col", 1)):
            wanted = tuple(Shard(0) if placement.is_shard(dim) else Replicate() for placement in weight.placements)
            assert pair.state(name)[entry].placements == wanted, (name, entry, weight.placements, pair.state(name)[entry])
    pair.mine_steps.load_state_dict(pair.twin_steps.state_dict())
    pair.train(1)
    pair.same()
    close([pair.state("0.weight")["step"].item()], [3], 0)
    for group in (pair.mine_steps.param_groups[0], pair.twin_steps.param_groups[0]):
        group["weight_decay"] = 0.1  # its code branches on this
    pair.train(1)
    pair.same()


def adafactor_elsewhere(mesh: Any) -> None:
    """With a rate of its own, and torch's."""
    for build in (as_the_trainer_has_it, adafactor_of_torch):
        pair = Pair(mesh, build)
        pair.train(3)
        pair.same()


def others(mesh: Any) -> None:
    """Roots and bases of whole matrices, blocks of flattened ones, and a kernel of another library with an update that is registered."""
    for build, within, width in ((Shampoo, 1e-9, 7), (Soap, 1e-9, 7), (AdamW8bit, 1e-12, 8), (registered, 1e-12, 7)):
        pair = Pair(mesh, build, width)
        pair.train(3)
        pair.same(within)


def around_a_step(mesh: Any) -> None:
    """A closure gives gradients and its loss; hooks see them ahead of the step, whenever they came; schedulers act and see the step."""
    pair = Pair(mesh, adafactor_of_torch)
    pair.train(1)
    rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for _, optimizer in pair.both()]

    def doubled(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(2)

    losses: list[float] = []
    for (model, optimizer), rate in zip(pair.both(), rates, strict=True):
        optimizer.register_step_pre_hook(doubled)
        optimizer.register_step_post_hook(lambda one, *_: losses.append(len(one.state)))

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(pair.x), pair.y)
            loss.backward()
            return loss

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            closure()
            optimizer.step()
            rate.step()
        loss: Any = optimizer.step(lambda: closure().detach())
        losses.append(float(loss))
    pair.same()
    close(losses[:3], losses[3:], 1e-12)
    frozen = pair.mine.get_parameter("0.bias")
    before = frozen.full_tensor().clone()  # type: ignore[operator]
    F.mse_loss(pair.mine(pair.x), pair.y).backward()
    frozen.grad = None
    pair.mine_steps.step()
    assert torch.equal(frozen.full_tensor(), before)  # type: ignore[operator]


class Counting(torch.optim.Optimizer):
    """Counts in itself, which no trace can follow."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            rows = self.state[parameter].setdefault("rows", torch.zeros(parameter.shape[:1], dtype=parameter.dtype))
            rows.add_(parameter.grad.flatten(1).square().mean(1) if parameter.dim() > 1 else parameter.grad.square())
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] / self.count)


def untraceable(mesh: Any) -> None:
    """It is said what to do, and its own code goes on: what it has for rows is whole on every rank."""
    pair = Pair(mesh, Counting)
    with pytest.warns(UserWarning, match=r"(?s)Counting.step changes self.count.*TrainStep.*register_update\(Counting"):
        pair.train(3)
    pair.same()
    assert type(pair.state("0.weight")["rows"]) is Tensor
    torch.testing.assert_close(pair.state("0.weight")["rows"], pair.twin_steps.state[pair.twin[0].weight]["rows"])


def derived(mesh: Any) -> None:
    """Lines of a user's around `super().step()` are torch's on DTensors; of a class that keeps other state they are part of its trace."""
    for kind in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor, Halves):
        kind([nn.Parameter(torch.zeros(2))], lr=0.1)  # whose steps torch has wrapped from now on
    for build in (Halves, HalvesAgain, Bounded, Averages, Cautious, Warms, Rows, Clips, Skips):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pair = Pair(mesh, partial(build, lr=0.05))
            pair.train(3)
            pair.same()


CHECKS = (adafactor, adafactor_elsewhere, others, around_a_step, untraceable, derived)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
