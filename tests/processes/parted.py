"""Ranks of which one changes weights or state by itself, compiles or calls in another order; and what all may do. Each way is a launch."""

from __future__ import annotations

import copy
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import meshc
from meshc.runtime.failure.failed_rank import world_board
from tests.processes.session import device_mesh

Step = Callable[[], Tensor]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.norm(self.up(x))))


class Job:
    """A model that has been trained for two steps: by a TrainStep, or by a loop of its user's over the compiled module."""

    def __init__(self, mesh: Any, by_step: bool = True, build: Callable[[], nn.Module] = Net) -> None:
        torch.manual_seed(0)
        self.model: Any = build()
        self.first = copy.deepcopy(self.model.state_dict())
        self.x, self.y = torch.randn(8, 4), torch.randn(8, 4)
        self.calls = 0
        if by_step:
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            step = meshc.TrainStep(self.model, optimizer=self.optimizer, loss=F.mse_loss)
            self.program = meshc.compile(step, mesh, args=(self.x,), kwargs={"target": self.y})
        else:
            self.program = meshc.compile(self.model, mesh, args=(self.x,))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.by_step = by_step
        self.steps(2)

    def step(self) -> Tensor:
        self.calls += 1
        if self.by_step:
            found: Tensor = self.program(self.x, target=self.y)
            return found
        loss = F.mse_loss(self.program(self.x), self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def steps(self, count: int) -> list[float]:
        return [self.step().item() for _ in range(count)]

    def for_ever(self) -> None:
        """Until this rank is told; a minute at most."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            self.step()


def on(rank: int) -> bool:
    return dist.get_rank() == rank


def loaded_on_rank_0(mesh: Any, by_step: bool = True) -> None:
    job = Job(mesh, by_step)
    if on(0):
        job.model.load_state_dict(job.first)
    job.for_ever()


def loaded_on_rank_0_in_a_loop(mesh: Any) -> None:
    loaded_on_rank_0(mesh, by_step=False)


class Heads(nn.Module):
    """Queries, keys and values in one weight, stored in no layout of torch's: what is seen of it is a copy, and reading it back sends."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.down = nn.Linear(4, 3 * 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.view(1, len(x), 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.down(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(len(x), 8))


def copies_loaded_on_rank_0(mesh: Any) -> None:
    job = Job(mesh, build=Heads)
    if on(0):
        job.model.load_state_dict(job.first)
    job.for_ever()


def copies_multiplied_on_rank_0(mesh: Any) -> None:
    job = Job(mesh, build=Heads)
    job.program.sync()
    if on(0):
        with torch.no_grad():
            job.model.qkv.weight.mul_(3)
    job.for_ever()


def copies_are_every_ranks(mesh: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the state dict of this AdamW holds DTensors")
        job = Job(mesh, build=Heads)
        job.model.load_state_dict({name: value / 2 for name, value in job.first.items()})
        job.step()
        job.optimizer.state_dict()
        job.program.sync()
        with torch.no_grad():
            job.model.qkv.weight.mul_(3)
        job.step()
        job.program.sync()
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(job.model.qkv.weight)
        job.step()
        job.program.load_state_dict(copy.deepcopy(job.program.state_dict()))
        job.step()
        get_model_state_dict(job.model)
        for _ in range(3):
            with torch.no_grad():
                job.model.down.weight[:, 3].zero_()
            assert not job.model.down.weight.full_tensor()[:, 3].any() and not job.model.down.weight[:, 3].any()
            job.step()


def multiplied_on_rank_1(mesh: Any, by_step: bool = True) -> None:
    job = Job(mesh, by_step)
    if on(1):
        with torch.no_grad():
            job.model.up.weight.mul_(3)
    job.for_ever()


def multiplied_on_rank_1_in_a_loop(mesh: Any) -> None:
    multiplied_on_rank_1(mesh, by_step=False)


def view_edited_on_rank_0(mesh: Any) -> None:
    """Torch gathers the whole for it, from ranks that do not come."""
    job = Job(mesh)
    if on(0):
        with torch.no_grad():
            job.model.up.weight[3].zero_()
    job.for_ever()


def read_on_rank_1_in_a_loop(mesh: Any) -> None:
    job = Job(mesh, by_step=False)
    if on(1):
        job.model.up.weight.full_tensor()
    job.for_ever()


def read_on_rank_1_while_others_compile(mesh: Any) -> None:
    job = Job(mesh)
    if on(1):
        bool((job.model.up.weight > 5).any())
    job.program(torch.randn(6, 4), target=torch.randn(6, 4))


def read_on_rank_1_at_the_end(mesh: Any) -> None:
    job = Job(mesh)
    if on(1):
        job.model.up.weight.full_tensor()


def state_changed_on_rank_0(mesh: Any) -> None:
    job = Job(mesh)
    if on(0):
        job.optimizer.state[job.model.up.weight]["exp_avg"].zero_()
    job.for_ever()


def state_replaced_on_rank_0(mesh: Any) -> None:
    job = Job(mesh)
    if on(0):
        state = job.optimizer.state[job.model.up.bias]
        state["exp_avg"] = torch.zeros(8)
    job.for_ever()


def state_changed_on_rank_0_in_a_loop(mesh: Any) -> None:
    job = Job(mesh, by_step=False)
    if on(0):
        job.optimizer.state[job.model.up.weight]["exp_avg"].zero_()
    job.for_ever()


def buffer_changed_on_rank_0(mesh: Any) -> None:
    job = Job(mesh)
    if on(0):
        job.model.norm.running_mean.fill_(2.0)
    job.for_ever()


def buffer_replaced_on_rank_0(mesh: Any) -> None:
    job = Job(mesh)
    if on(0):
        job.model.norm.running_mean = torch.ones(8)
    job.for_ever()


def stepped_on_rank_0(mesh: Any) -> None:
    job = Job(mesh, by_step=False)
    if on(0):
        job.optimizer.step()
        for parameter in job.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        job.optimizer.step()
        job.optimizer.zero_grad()
    job.for_ever()


def another_state_on_each_rank(mesh: Any) -> None:
    """Every rank loads, each another file."""
    job = Job(mesh)
    job.model.load_state_dict({name: value * (1 + dist.get_rank()) for name, value in job.first.items()})
    job.for_ever()


def data_on_rank_0(mesh: Any) -> None:
    """Which leaves no trace: found by comparing values, at the latest where they are given away."""
    job = Job(mesh)
    if on(0):
        for parameter in job.model.parameters():
            parameter.data.mul_(3)
    job.steps(2)
    job.program.state_dict()


def multiplied_before_saving(mesh: Any) -> None:
    """And no call behind it."""
    job = Job(mesh)
    if on(0):
        with torch.no_grad():
            job.model.up.weight.mul_(3)
    job.program.state_dict()


def multiplied_before_a_checkpoint(mesh: Any) -> None:
    job = Job(mesh)
    if on(0):
        with torch.no_grad():
            job.model.up.weight.mul_(3)
    get_model_state_dict(job.model)


def _two(mesh: Any, *, apart: bool, opposite: bool, alike: bool = False) -> list[Any]:
    """Two models, in this rank's order of compiling; and which is which."""
    models = []
    for number in range(2):
        torch.manual_seed(10 * (0 if alike else number) + (dist.get_rank() if apart else 0))
        models.append(Net())
    order = (0, 1) if on(0) or not opposite else (1, 0)
    x = torch.ones(8, 4)
    programs = {number: meshc.compile(models[number], mesh, args=(x,)) for number in order}
    return [models, programs, x]


def models_in_opposite_order(mesh: Any) -> None:
    _two(mesh, apart=False, opposite=True)


def called_in_opposite_order(mesh: Any, **how: Any) -> None:
    models, programs, x = _two(mesh, **{"apart": False, "opposite": False, **how})
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    order = (0, 1) if on(0) or how.get("opposite") else (1, 0)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for number in order:
            programs[number](x).square().mean().backward()
            optimizers[number].step()
            optimizers[number].zero_grad()


def copies_in_opposite_order(mesh: Any) -> None:
    """Of equal first values, which do not tell: their calls do."""
    called_in_opposite_order(mesh, opposite=True, alike=True)


def apart_in_opposite_order(mesh: Any) -> None:
    """Of ranks that are seeded apart."""
    called_in_opposite_order(mesh, opposite=True, apart=True)


def steps_in_opposite_order(mesh: Any) -> None:
    """Two training steps of one model, of two losses."""
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 4), torch.randn(8, 4)
    losses = [F.mse_loss, F.l1_loss]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = (0, 1) if on(0) else (1, 0)
    programs = {}
    for number in order:
        step = meshc.TrainStep(model, optimizer=optimizer, loss=losses[number])
        programs[number] = meshc.compile(step, mesh, args=(x,), kwargs={"target": y})
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for number in (0, 1):
            programs[number](x, target=y)


def _legitimate(job: Job) -> None:
    """What every rank does alike, and what one may do alone; a step behind each."""
    model, optimizer = job.model, job.optimizer
    half = {name: value / 2 for name, value in job.first.items()}
    model.load_state_dict(half)
    job.step()
    with torch.no_grad():
        model.up.weight.mul_(2)
        model.norm.running_mean.add_(1)
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    job.step()
    optimizer.state[model.up.weight]["exp_avg"].zero_()
    optimizer.param_groups[0]["lr"] = 1e-3
    job.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    job.step()
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(model.down.weight)
    job.step()
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}  # swapped for others, and back
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    job.step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    job.step()
    for _ in range(20):  # weights are clipped behind each step
        job.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
    if on(0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that these are parts
            alone = [copy.deepcopy(model.state_dict()) for _ in range(3)]
            assert len(alone) == 3
            optimizer.state_dict()
    get_model_state_dict(model)
    job.program.load_state_dict(copy.deepcopy(job.program.state_dict(full=False)))
    job.step()
    job.program.state_dict()
    job.step()
    state = job.program.state_dict(full=True)
    assert bool(state) == on(0)


def _by_hand(job: Job) -> None:
    """Parameters that are updated without an optimizer."""
    for _ in range(20):
        F.mse_loss(job.program(job.x), job.y).backward()
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    job.program.state_dict()


def nothing_is_wrong(mesh: Any) -> None:
    """Each of these is every rank's own affair, or is made on all: no word."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the state dict of this")  # that it is of parts
        _legitimate(Job(mesh))
        if "pp" not in mesh.mesh_dim_names:
            loop = Job(mesh, by_step=False)
            _legitimate(loop)
            _by_hand(loop)
    board = world_board()
    board.settle(20)
    assert board.numbers.has_compared([rank for rank in range(dist.get_world_size()) if not on(rank)], board.numbers.to_say())


WAYS: tuple[Callable[[Any], None], ...] = (
    loaded_on_rank_0, loaded_on_rank_0_in_a_loop, multiplied_on_rank_1, multiplied_on_rank_1_in_a_loop, state_changed_on_rank_0,
    state_replaced_on_rank_0, state_changed_on_rank_0_in_a_loop, buffer_changed_on_rank_0, buffer_replaced_on_rank_0,
    stepped_on_rank_0, another_state_on_each_rank, data_on_rank_0, multiplied_before_saving, multiplied_before_a_checkpoint,
    copies_loaded_on_rank_0, copies_multiplied_on_rank_0, copies_are_every_ranks, nothing_is_wrong, models_in_opposite_order,
    called_in_opposite_order, copies_in_opposite_order, apart_in_opposite_order, steps_in_opposite_order, view_edited_on_rank_0,
    read_on_rank_1_in_a_loop, read_on_rank_1_while_others_compile, read_on_rank_1_at_the_end,
)  # fmt: skip


def run(name: str, mesh: str) -> None:
    dist.init_process_group("gloo")
    where = device_mesh(mesh)
    try:
        next(way for way in WAYS if way.__name__ == name)(where)
    except meshc.MeshcError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)
    print("no error", flush=True)
