"""Ranks that go wrong alone: each function runs in a launch of its own, and prints the error that this rank got."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import meshc
from tests.models import Case, mlp
from tests.processes.reference import sgd
from tests.processes.session import device_mesh
from tests.two_outputs import two_outputs


def program_of(case: Case, mesh: Any, inputs: str = "global") -> meshc.Program:
    return meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss), mesh, inputs=inputs)


def killed(mesh: Any) -> None:
    """Rank 1 is killed in its second step: a thread does it, while the main thread computes and communicates."""
    case = mlp(batch=2000, width=1000)
    program = program_of(case, mesh)
    program(**case.call_kwargs)
    print("one step", flush=True)
    if dist.get_rank() == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(1000):
        program(**case.call_kwargs)


def staged(mesh: Any, schedule: str = "1f1b") -> tuple[meshc.Program, Case]:
    case = mlp(batch=2000, width=1000)
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=case.loss, microbatches=4)
    program = meshc.compile(step, mesh, options=meshc.Options(pipeline=meshc.Pipelining(schedule=schedule)))
    program(**case.call_kwargs)
    print("one step", flush=True)
    return program, case


def killed_in_a_pipeline(mesh: Any) -> None:
    """Rank 1 is killed between its microbatches."""
    program, case = staged(mesh)
    if dist.get_rank() == 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for _ in range(1000):
        program(**case.call_kwargs)


def other_schedule_in_a_pipeline(mesh: Any) -> None:
    staged(mesh, "gpipe" if dist.get_rank() else "1f1b")


def raises_in_a_pipeline(mesh: Any) -> None:
    """Rank 1 runs out of something in the backward of its second step's third microbatch."""
    program, case = staged(mesh)
    session = program.compilations.last.session
    assert session is not None
    if dist.get_rank() == 1:
        stages, name = session.executor.stages, "backward_1"
        stage = stages[name]

        def run(inputs: list[Any], microbatch: int, *sums: Any) -> list[Any]:
            if microbatch == 2:
                raise ValueError("nothing left")
            return stage.run(inputs, microbatch, *sums)

        stages[name] = dataclasses.replace(stage, run=run)
    for _ in range(1000):
        program(**case.call_kwargs)


def other_values(mesh: Any) -> None:
    """Every rank passes a batch of its own to a program of global inputs."""
    case = mlp()
    program = program_of(case, mesh)
    case.kwargs["x"] += dist.get_rank()
    program(**case.call_kwargs)


def other_shape(mesh: Any) -> None:
    case = mlp()
    program = program_of(case, mesh)
    program(**case.call_kwargs)
    rows = 5 if dist.get_rank() == 1 else 6
    program(**{name: value[:rows] for name, value in case.call_kwargs.items()})


def other_shape_at_first(mesh: Any) -> None:
    case = mlp()
    rows = 5 if dist.get_rank() == 1 else 6
    program_of(case, mesh)(**{name: value[:rows] for name, value in case.call_kwargs.items()})


def other_dtype(mesh: Any) -> None:
    case = mlp()
    program = program_of(case, mesh)
    program(**case.call_kwargs)
    program(x=case.kwargs["x"].double() if dist.get_rank() == 1 else case.kwargs["x"], **case.target_kwargs)


def other_mode(mesh: Any) -> None:
    """Rank 1 alone goes into evaluation, and freezes a layer."""
    case = mlp()
    program = program_of(case, mesh)
    program(**case.call_kwargs)
    if dist.get_rank() == 1:
        case.model.eval()
        case.model.down.requires_grad_(False)
    program(**case.call_kwargs)


def in_a_worker(mesh: Any) -> None:
    """A data set runs a program in a worker that its loader has forked; the loop itself goes on."""
    case = mlp()
    program = meshc.compile(case.model.requires_grad_(False), mesh, kwargs=case.kwargs)
    program(**case.kwargs)

    class Features(Dataset[Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, place: int) -> Tensor:
            found: Tensor = program(**case.kwargs)
            return found

    try:
        for _ in DataLoader(Features(), num_workers=1, multiprocessing_context="fork"):
            pass
    except meshc.StateError as error:
        print(str(error).splitlines()[-3:], flush=True)
    program(**case.kwargs)
    raise meshc.StateError("the end")


def other_structure(mesh: Any) -> None:
    model = TwoNames()
    program = meshc.compile(meshc.TrainStep(model, optimizer=sgd(model.parameters())), mesh)
    x = torch.ones(4, 8)
    program(x=x)
    if dist.get_rank() == 1:
        program(x=x, extra=x)
    else:
        program(x=x)


def other_model(mesh: Any) -> None:
    program_of(mlp(width=40 if dist.get_rank() else 44), mesh)(**mlp().call_kwargs)


def other_setting(mesh: Any) -> None:
    """Rank 1 has another default dtype, which its program would not show."""
    if dist.get_rank() == 1:
        torch.set_default_dtype(torch.float64)
    program_of(mlp(torch.float32), mesh)(**mlp(torch.float32).call_kwargs)


def other_code(mesh: Any) -> None:
    """The forward of rank 1 is another one, which nothing but its program shows."""
    case = mlp()
    if dist.get_rank() == 1:
        case.model.norm = nn.LayerNorm(24, eps=1e-3)
    program_of(case, mesh)(**case.call_kwargs)


def compile_fails(mesh: Any) -> None:
    """The forward of rank 1 alone branches on data."""
    model = Branching(dist.get_rank() == 1)
    meshc.compile(meshc.TrainStep(model, optimizer=sgd(model.parameters())), mesh, kwargs={"x": torch.ones(4, 8)})


def other_outputs(mesh: Any) -> None:
    """Both ranks go backward from `score`; then rank 1 from `length`, while rank 0 does what it did before and asks nobody."""
    model, x = two_outputs()
    program = meshc.compile(model, mesh, kwargs={"x": x})
    program(x=x)["score"].sum().backward()
    program(x=x)["length" if dist.get_rank() == 1 else "score"].sum().backward()


def other_outputs_at_first(mesh: Any) -> None:
    model, x = two_outputs()
    program = meshc.compile(model, mesh, kwargs={"x": x})
    program(x=x)["length" if dist.get_rank() == 1 else "score"].sum().backward()


def wrong_world(_: Any) -> None:
    """A mesh of two ranks in a world of four."""
    mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    program_of(mlp(), mesh)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return self.linear(x if extra is None else x + extra).square().mean()


class Branching(nn.Module):
    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.branches and y.sum() > 0:
            y = y + 1
        return y.square().mean()


WAYS: tuple[Callable[[Any], None], ...] = (
    killed, killed_in_a_pipeline, raises_in_a_pipeline, other_schedule_in_a_pipeline,
    other_values, other_shape, other_shape_at_first, other_dtype, other_mode, in_a_worker,
    other_structure, other_model, other_setting, other_code,
    compile_fails, other_outputs, other_outputs_at_first, wrong_world,
)  # fmt: skip


def run(name: str) -> None:
    dist.init_process_group("gloo")
    axis = "pp" if name.endswith("pipeline") else "dp"
    mesh = None if name == "wrong_world" else device_mesh(f"{axis}={dist.get_world_size()}")
    try:
        next(way for way in WAYS if way.__name__ == name)(mesh)
    except meshc.MeshcError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)
    print("no error", flush=True)
