"""Loss scaling on real ranks: the scale, skipped steps and parameters of plain torch with its GradScaler; state that goes on elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshc
from tests.processes.reference import close, furthest
from tests.processes.session import device_mesh, run_checks

LIMIT = 0.05
SPIKES = {2: 1e12, 3: float("nan")}
"""What a row of `z` is multiplied by in some steps: its gradient times the scale is then beyond float32."""
STEPS = 6


class Sides(nn.Module):
    """Of a large row of z only the gradient of `side.weight` is large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.side, self.down = nn.Linear(6, 8), nn.Linear(6, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()) + self.side(z)


def _model() -> nn.Module:
    torch.manual_seed(3)
    return Sides()


def _mean(output: Tensor) -> Tensor:
    return output.mean()


def _scaler(**more: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**96, "growth_interval": 2, "growth_factor": 4.0, **more})


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    """The last row of z is out of range in some steps: it is the last rank's."""
    random = torch.Generator().manual_seed(step)
    x, z = torch.randn(8, 6, generator=random), torch.randn(8, 6, generator=random)
    z[-1] *= SPIKES.get(step, 1.0)
    return x, z


class Plain:
    """Torch's own loop, in this process."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.model, self.scaler = _model(), scaler
        self.optimizer = _adam(self.model)

    def step(self, number: int) -> tuple[float, str]:
        """The step's scale, and the first parameter whose gradient is not finite."""
        scale = self.scaler.get_scale()
        self.optimizer.zero_grad()
        self.scaler.scale(_mean(self.model(*_batch(number)))).backward()
        self.scaler.unscale_(self.optimizer)
        wrong = [name for name, p in self.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return scale, wrong[0] if wrong else ""


def _whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in model.named_parameters()}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> meshc.TrainStep:
    return meshc.TrainStep(model, optimizer=optimizer, loss=_mean, clip_grad_norm=LIMIT, **more)


def _plan(mesh: Any) -> str | None:
    return "fsdp" if "pp" not in mesh.mesh_dim_names and {"dp", "dp_shard"} & {*mesh.mesh_dim_names} else None


def _count(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(entry["step"]) for entry in optimizer.state.values()}


def decided(mesh: Any) -> None:
    """All ranks skip the steps that plain torch skips, at its scales, and know whose gradient was first not finite."""
    staged = "pp" in mesh.mesh_dim_names
    model, scaler, plain = _model(), _scaler(), Plain(_scaler())
    optimizer = _adam(model)
    told = []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert scheduler.last_epoch == 0
    program = meshc.compile(
        _step(model, optimizer, scaler=scaler, microbatches=2 if staged else None), mesh, args=_batch(0), plan=_plan(mesh)
    )
    for step in range(STEPS):
        program(*_batch(step))
        scale, first = plain.step(step)
        assert (program.metrics["loss_scale"], program.metrics["skipped"]) == (scale, first), (step, program.metrics, scale, first)
        assert scaler.state_dict() == plain.scaler.state_dict()
        told.append(first)
        if not staged:
            program.sync()
            worst = furthest(_whole(model), _whole(plain.model))
            assert worst[0] < 1e-5, (step, worst)
            assert _count(optimizer) == _count(plain.optimizer)
    assert told == ["", "", "side.weight", "side.weight", "", ""]
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(state["model"], _whole(plain.model))[0] < 1e-5
        assert {float(slots["step"]) for slots in state["optim"]["state"].values()} == {4.0}
        assert state["meshc"]["scaler"] == plain.scaler.state_dict()


def own_loop(mesh: Any) -> None:
    """A loop of one's own with torch's scaler around a compiled module: gradients are each rank's part, and the decision is one."""
    model, scaler, plain = _model(), _scaler(), Plain(_scaler())
    program = meshc.compile(model, mesh, args=_batch(0), plan=_plan(mesh))
    optimizer = _adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(_mean(program(*_batch(step)))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        plain.step(step)
        assert scaler.state_dict() == plain.scaler.state_dict(), step
        assert furthest(_whole(model), _whole(plain.model))[0] < 1e-5, step
    assert _count(optimizer) == {4.0}


def autocast(mesh: Any) -> None:
    """Float16: a scale that is too large falls until gradients fit, as in plain torch."""
    model, twin = _model(), _model()
    scaler, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**20) for _ in range(2))
    optimizer, other = _adam(model), _adam(twin)
    x, z = _batch(0)
    with torch.autocast("cpu", dtype=torch.float16):
        program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, loss=_mean, scaler=scaler), mesh, args=(x, z), plan=_plan(mesh))
    scales, wanted = list[float](), list[float]()
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.float16):
            program(x, z)
            loss = _mean(twin(x, z))
        scales.append(program.metrics["loss_scale"])
        wanted.append(theirs.get_scale())
        other.zero_grad()
        theirs.scale(loss).backward()
        theirs.step(other)
        theirs.update()
    assert scales == wanted and len(set(scales)) > 2, (scales, wanted)
    program.sync()
    assert furthest(_whole(model), _whole(twin))[0] < 2e-2


def accumulated(mesh: Any) -> None:
    """Gradients that are added up over calls: one that is not finite skips the step of all, and is gone with it."""
    model, scaler, plain = _model(), _scaler(), Plain(_scaler())
    optimizer = _adam(model)
    options = meshc.Options(training=meshc.Training(accumulate=True))
    program = meshc.compile(_step(model, optimizer, scaler=scaler), mesh, args=_batch(0), plan=_plan(mesh), options=options)
    for step in range(STEPS):
        before = scaler.state_dict()
        program.accumulate(*_batch(step))
        assert scaler.state_dict() == before
        program(*_batch(9))
        plain.optimizer.zero_grad()
        plain.scaler.scale(_mean(plain.model(*_batch(step)))).backward()
        plain.scaler.scale(_mean(plain.model(*_batch(9)))).backward()
        plain.scaler.unscale_(plain.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), LIMIT)
        plain.scaler.step(plain.optimizer)
        plain.scaler.update()
        assert scaler.state_dict() == plain.scaler.state_dict(), step
        assert bool(program.metrics["skipped"]) == (step in SPIKES)
        if step not in SPIKES:
            close([float(program.metrics["grad_norm"])], [float(norm)], 1e-5)
        program.sync()
        assert furthest(_whole(model), _whole(plain.model))[0] < 1e-5, step


def a_scale_of_one_rank(mesh: Any) -> None:
    """Last: a scaler that is changed on one rank alone ends on all."""
    scaler = _scaler()
    model = _model()
    program = meshc.compile(_step(model, _adam(model), scaler=scaler), mesh, args=_batch(0))
    program(*_batch(0))
    if dist.get_rank() == 1:
        scaler.update(2.0)
    with pytest.raises(meshc.MeshcError, match="loss_scale"):
        for step in range(40):
            program(*_batch(step + 10))


CHECKS: tuple[Callable[[Any], None], ...] = (decided, own_loop, autocast, accumulated, a_scale_of_one_rank)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)


def resume(mesh: str, folder: str, do: str) -> None:
    """do: `save` trains half of the steps and saves; `load` loads under this mesh and trains the rest."""
    dist.init_process_group("gloo")
    model, scaler, plain = _model(), _scaler(init_scale=1.0 if do == "load" else 2.0**96), Plain(_scaler())
    if do == "load":
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
    optimizer = _adam(model)
    step = _step(model, optimizer, scaler=scaler, microbatches=2 if "pp" in mesh else None)
    program = meshc.compile(step, device_mesh(mesh), args=_batch(0))
    half, path = STEPS // 2, Path(folder)
    if do == "load":
        state = {"program": program}
        dcp.load(state, checkpoint_id=path)
        for number in range(half):
            plain.step(number)
        assert scaler.state_dict() == plain.scaler.state_dict()
    for number in range(half) if do == "save" else range(half, STEPS):
        program(*_batch(number))
        scale, first = plain.step(number)
        assert (program.metrics["loss_scale"], program.metrics["skipped"]) == (scale, first), number
    if do == "save":
        dcp.save({"program": program}, checkpoint_id=path)
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert furthest(copy.copy(state["model"]), _whole(plain.model))[0] < 1e-5
        print(scaler.get_scale(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
