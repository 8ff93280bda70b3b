"""Training loops as people write them, on real ranks: hooks, gradients that are kept or added up, counts in groups, two steps of a
model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshc
from tests.models import mlp
from tests.optimizer.others import ScheduleFree
from tests.processes.reference import close, furthest
from tests.processes.session import run_checks


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def _names(model: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in sorted(model.named_parameters())]


def _same(model: nn.Module, twin: nn.Module) -> None:
    assert furthest(_whole(model), _whole(twin))[0] < 1e-9


def _pair() -> tuple[Any, nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A case, its model, a copy of it for plain torch, and an optimizer for each."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    return case, case.model, twin, *(torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (case.model, twin))


def _backward(case: Any, twin: nn.Module, share: float = 1.0) -> float:
    loss = F.cross_entropy(twin(**case.kwargs), case.target_kwargs["target"])
    (loss * share).backward()
    return loss.item()


def _compiled(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Any, **more: Any) -> meshc.Program:
    options = meshc.Options(**more.pop("options", {}))
    step = meshc.TrainStep(model, optimizer=optimizer, loss=more.pop("loss", F.cross_entropy), **more)
    return meshc.compile(step, mesh, kwargs=case.call_kwargs, plan="fsdp", options=options)


def hooked(mesh: Any) -> None:
    """Hooks that were there before compiling, that are taken away by their handles, and that come later, run as in plain torch."""
    case, model, twin, optimizer, theirs = _pair()

    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    hang: list[Callable[[nn.Module], Any]] = [
        lambda m: _names(m)[0].register_hook(lambda g: 0.1 * g),
        lambda m: _names(m)[1].register_post_accumulate_grad_hook(clamp),
    ]
    handles = [[one(m) for one in hang] for m in (model, twin)]
    program = _compiled(case, model, optimizer, mesh, clip_grad_norm=0.05)
    for step in range(4):
        if step == 2:
            for pair in handles:
                pair[0].remove()
        if step == 3:
            for m in (model, twin):
                _names(m)[-1].register_hook(lambda g: g * 0)
        wanted = _backward(case, twin)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
        close([program(**case.call_kwargs).item()], [wanted], 1e-9)
    _same(model, twin)
    assert len(program.compilations.kept) == 3


def kept(mesh: Any) -> None:
    """`.grad` after a call is what the parameter was updated with."""
    case, model, twin, optimizer, theirs = _pair()
    program = _compiled(case, model, optimizer, mesh, clip_grad_norm=0.05, options={"keep_gradients": True})
    for _ in range(2):
        program(**case.call_kwargs)
        _backward(case, twin)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        assert furthest(found, {name: p.grad for name, p in twin.named_parameters()})[0] < 1e-9
        total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        close([total.full_tensor().item()], [0.05], 1e-4)
        theirs.step()
        theirs.zero_grad()
        optimizer.zero_grad()
    _same(model, twin)


def added(mesh: Any) -> None:
    """Three calls are one step: gradients of all are summed, clipped and used, and begin again at nothing."""
    case, model, twin, optimizer, theirs = _pair()

    def third(output: Tensor, target: Tensor) -> Any:
        loss = F.cross_entropy(output, target)
        return loss / 3, {"whole": loss}

    program = _compiled(case, model, optimizer, mesh, loss=third, clip_grad_norm=0.05, options={"accumulate": True})
    for _ in range(2):
        for call in (program.accumulate, program.accumulate, program):
            wanted = _backward(case, twin, 1 / 3)
            norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters()])
            before = _whole(model)
            close([call(**case.call_kwargs).item()], [wanted / 3], 1e-9)
            close([program.metrics["whole"].item(), program.metrics["grad_norm"].item()], [wanted, norm.item()], 1e-9)
            assert (furthest(before, _whole(model))[0] == 0) == (call != program)
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
    _same(model, twin)
    with pytest.raises(meshc.StateError, match=r"Training\(accumulate=True\)"):
        _plainly(case, mesh).accumulate(**case.call_kwargs)


def _plainly(case: Any, mesh: Any) -> meshc.Program:
    model = mlp(torch.float64).model
    return _compiled(case, model, torch.optim.SGD(model.parameters(), lr=0.1), mesh)


def counted(mesh: Any) -> None:
    """What a step counts in its group is there after each call, and may be written before one; averages are looked at in between."""
    case = mlp(torch.float64)
    model, twin = case.model, copy.deepcopy(case.model)
    optimizer, theirs = ScheduleFree(model.parameters()), ScheduleFree(twin.parameters())
    optimizer.train()
    theirs.train()
    program = _compiled(case, model, optimizer, mesh)
    for step in range(5):
        if step == 0:
            optimizer.param_groups[0]["k"] = theirs.param_groups[0]["k"] = 1  # which has been compiled at 0
        if step == 3:  # warms up again, by what a loader puts there
            for one in (optimizer, theirs):
                state = one.state_dict()
                state["param_groups"][0]["k"] = 0
                one.load_state_dict(state)
        if step == 4:
            optimizer.eval()
            theirs.eval()
            _same(model, twin)
            optimizer.train()
            theirs.train()
        close([program(**case.call_kwargs).item()], [_backward(case, twin)], 1e-9)
        theirs.step()
        theirs.zero_grad()
        for name in ("k", "weight_sum", "lr_max", "scheduled_lr"):
            close([optimizer.param_groups[0][name]], [theirs.param_groups[0][name]], 1e-12)
    _same(model, twin)
    assert len(program.compilations.kept) == 1


def behind(mesh: Any) -> None:
    """What is hung behind an optimizer's step runs after each call; what is hung ahead of it is refused, when it comes."""
    case, model, twin, optimizer, theirs = _pair()

    def clamp(one: torch.optim.Optimizer, *_: Any) -> None:
        for p in one.param_groups[0]["params"]:
            p.data.clamp_(-0.1, 0.1)

    for one in (optimizer, theirs):
        one.register_step_post_hook(clamp)
    program = _compiled(case, model, optimizer, mesh)
    for _ in range(2):
        close([program(**case.call_kwargs).item()], [_backward(case, twin)], 1e-9)
        theirs.step()
        theirs.zero_grad()
    _same(model, twin)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(meshc.StateError, match=r"AdamW has a hook ahead of its step \(register_step_pre_hook\)"):
        program(**case.call_kwargs)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Tensor:
        made = self.generator(noise)
        if real is None:
            return F.softplus(-self.critic(made)).mean()
        return F.softplus(self.critic(made.detach())).mean() + F.softplus(-self.critic(real)).mean()


def two_steps(mesh: Any) -> None:
    """A generator's and a discriminator's steps take turns over one module, each with an optimizer and a clipping of its own."""
    model = Gan().double()
    twin = copy.deepcopy(model)
    noise, real = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    torch.distributed.broadcast(noise, 0)
    torch.distributed.broadcast(real, 0)
    mine = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model.generator, model.critic)]
    theirs = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (twin.generator, twin.critic)]
    clip = {"generator.*": 0.05}
    generate = meshc.compile(meshc.TrainStep(model, optimizer=mine[0], clip_grad_norm=clip), mesh, plan="fsdp")
    judge = meshc.compile(meshc.TrainStep(model, optimizer=mine[1]), mesh, args=(noise, real), plan="fsdp")
    for _ in range(3):
        loss = twin(noise, real)
        loss.backward()
        theirs[1].step()
        twin.zero_grad()
        close([judge(noise, real).item()], [loss.item()], 1e-9)
        loss = twin(noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.generator.parameters(), 0.05)
        theirs[0].step()
        twin.zero_grad()
        close([generate(noise).item()], [loss.item()], 1e-9)
    _same(model, twin)
    state = generate.state_dict()
    assert {"generator.0.weight", "critic.0.weight"} <= state["optim"]["state"].keys()
    again = torch.optim.SGD(model.generator.parameters(), lr=0.1)
    with pytest.raises(meshc.StateError, match=r"generator.0.weight.*another Adam updates this already"):
        meshc.compile(meshc.TrainStep(model, optimizer=again), mesh, args=(noise,), plan="fsdp")
    assert generate(noise).isfinite(), "all ranks have refused together, and go on"


CHECKS = (hooked, kept, added, counted, behind, two_steps)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
