"""Random values that are drawn into the parameters of a compiled model, on every rank. Each function is one check."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshc
from tests.processes.session import run_checks


class Pair:
    """A compiled model, and its twin on one device, both in float64."""

    def __init__(self, mesh: Any, step: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        self.mine = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 4)).double()
        self.twin = copy.deepcopy(self.mine)
        self.x, self.y = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
        if step:
            optimizer = torch.optim.SGD(self.mine.parameters(), lr=0.0)
            made = meshc.TrainStep(self.mine, optimizer=optimizer, loss=F.mse_loss, **options)
            self.program = meshc.compile(made, mesh, args=(self.x,), kwargs={"target": self.y})
        else:
            self.program = meshc.compile(self.mine, mesh, args=(self.x,))

    def draw(self, seed: int, theirs: int | None = None) -> None:
        """Into both, after this seed. theirs: the one of the twin."""
        for model, begin in ((self.mine, seed), (self.twin, seed if theirs is None else theirs)):
            torch.manual_seed(begin)
            for number, parameter in enumerate(model.parameters()):
                (nn.init.kaiming_uniform_ if parameter.dim() > 1 and number else nn.init.normal_)(parameter)

    def equal(self) -> bool:
        pairs = zip(self.mine.parameters(), self.twin.parameters(), strict=True)
        return all(torch.equal(whole(one), other.detach()) for one, other in pairs)


def whole(value: Tensor) -> Tensor:
    assert isinstance(value, DTensor)
    return value.full_tensor().detach()


def same_on_all(value: Tensor) -> bool:
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return all(torch.equal(one, value) for one in found)


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Of each parameter what this rank has."""
    return {name: p.to_local().detach().clone() for name, p in model.named_parameters() if isinstance(p, DTensor)}


def seeded_alike(mesh: Any) -> None:
    """What one device draws, and its generator is where that of one device is."""
    pair = Pair(mesh)
    pair.draw(5)
    after = torch.get_rng_state()
    assert pair.equal()
    torch.testing.assert_close(pair.mine(pair.x), pair.twin(pair.x))
    torch.manual_seed(5)
    for parameter in pair.twin.parameters():
        (nn.init.kaiming_uniform_ if parameter.dim() > 1 and parameter.shape != (6, 4) else nn.init.normal_)(parameter)
    assert torch.equal(after, torch.get_rng_state())


def seeded_apart(mesh: Any) -> None:
    """Replicas are the first one's once the program has run; its results are one model's."""
    pair = Pair(mesh)
    pair.draw(dist.get_rank())
    output = pair.mine(pair.x).detach()
    assert same_on_all(output)
    pair.twin.load_state_dict({name: whole(p) for name, p in pair.mine.named_parameters()})
    torch.testing.assert_close(output, pair.twin(pair.x).detach())
    for name, parameter in pair.mine.named_parameters():
        assert isinstance(parameter, DTensor)
        if all(placement.is_replicate() for placement in parameter.placements):
            assert same_on_all(parameter.to_local().detach()), name


def of_other_kinds(mesh: Any) -> None:
    """A generator of one's own, noise like a parameter, dropout and draws by a parameter's values."""
    pair = Pair(mesh)
    own = torch.Generator()
    kinds: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda p: p.detach().clone().normal_(generator=own.manual_seed(7)), torch.randn_like, torch.rand_like,
        lambda p: F.dropout(p, 0.4), lambda p: torch.bernoulli(p.sigmoid()), lambda p: p.detach().clone().bernoulli_(0.3),
        lambda p: torch.randint_like(p, 100),
    )  # fmt: skip
    for kind in kinds:
        for one, other in zip(pair.mine.parameters(), pair.twin.parameters(), strict=True):
            torch.manual_seed(3)
            mine = kind(one)
            after = torch.get_rng_state()
            torch.manual_seed(3)
            assert torch.equal(whole(mine), kind(other).detach())
            assert torch.equal(after, torch.get_rng_state())


def in_a_step(mesh: Any) -> None:
    """Under a step too, whose parameters may live on stages: there they are drawn from the generators of their stage's ranks."""
    pair = Pair(mesh, step=True, microbatches=2)
    before = parts(pair.mine)
    pair.draw(dist.get_rank())
    loss = pair.program(pair.x, pair.y)
    assert same_on_all(loss.detach().reshape(1))
    state = pair.program.state_dict(full=True)
    if dist.get_rank() == 0:
        pair.twin.load_state_dict(state["model"])
        torch.testing.assert_close(loss.detach(), F.mse_loss(pair.twin(pair.x), pair.y).detach())
    assert all(not torch.equal(part, before[name]) for name, part in parts(pair.mine).items() if part.numel())


CHECKS = (seeded_alike, seeded_apart, of_other_kinds, in_a_step)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
