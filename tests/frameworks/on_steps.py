"""What people put into a training step. Rows of docs/ecosystem.md by checks that stand in `tests/processes/`, and by functions here."""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import meshc
from tests.frameworks.on_torch import X, mlp
from tests.frameworks.rows import Rows, refuses, same, same_parameters, shared_folder, under_torchrun
from tests.processes import loops, metrics, module_mode, train_step
from tests.processes.session import run_checks

ROWS = Rows("steps")
ADDED = "Options(training=Training(accumulate=True)), and program.accumulate(...)"

for _what, _check, _more in (
    ("a loss that returns (loss, metrics)", metrics.whole, {"mesh": "dp=2"}),
    ("targets by position, losses with arguments of their own", train_step.loss_arguments, {"mesh": "dp=2"}),
    ("a GAN: two steps of one module, each with an optimizer", loops.two_steps, {"mesh": "dp=2"}),
    ("hooks on gradients of parameters: scaling, clamping, noise", loops.hooked, {"mesh": "dp=2"}),
    ("hooks behind an optimizer's step", loops.behind, {"mesh": "dp=2"}),
    (".grad after a step", loops.kept, {"mesh": "dp=2", "line": "Options(training=Training(keep_gradients=True))"}),
    ("accumulation within a call", train_step.microbatches, {"mesh": "dp=2", "line": "TrainStep(..., microbatches=8)"}),
    ("accumulation over calls", loops.added, {"mesh": "dp=2", "line": ADDED}),
    ("weight decay to 0 between steps", train_step.weight_decay_to_zero, {"mesh": "dp=2"}),
    ("autocast in the model and around the call", train_step.autocast, {"mesh": "dp=2"}),
    ("several programs of one model: training, evaluation", module_mode.two_programs, {}),
):
    ROWS.row(_what, **_more)(_check)  # type: ignore[arg-type]


@ROWS.row("a loss that returns a dict, its other entries as metrics", mesh="dp=2")
def dictionary(mesh: Any) -> None:
    def loss(made: Tensor) -> dict[str, Tensor]:
        return {"loss": made.square().mean(), "largest": made.abs().amax()}

    model = mlp()
    wanted = loss(copy.deepcopy(model)(X))
    program = meshc.compile(meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=loss), mesh, args=(X,))
    same(program(X), wanted["loss"])
    same(program.metrics["largest"], wanted["largest"])


class Distilled(nn.Module):
    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.teacher(x).detach())


def pair() -> tuple[nn.Module, nn.Module]:
    student, teacher = mlp(), mlp()
    for parameter in teacher.parameters():
        parameter.data.mul_(1.5)
    return student, teacher


@ROWS.row("a teacher beside the student", line="both in one nn.Module, the teacher requires_grad_(False)")
def distilled(mesh: Any) -> None:
    student, teacher = pair()
    both = Distilled(student, teacher)
    twin = copy.deepcopy(both)
    step = meshc.TrainStep(both, optimizer=torch.optim.AdamW(student.parameters(), lr=0.1))
    program = meshc.compile(step, mesh, args=(X,))
    plain = torch.optim.AdamW(twin.student.parameters(), lr=0.1)
    for _ in range(2):
        program(X)
        twin(X).backward()
        plain.step()
        plain.zero_grad()
    same_parameters(both, twin)


@ROWS.row("a loss that calls another model", refused="names the line; both in one nn.Module")
def another_model(mesh: Any) -> None:
    student, teacher = pair()

    def loss(made: Tensor, x: Tensor) -> Tensor:
        return F.mse_loss(made, teacher(x).detach())

    step = meshc.TrainStep(student, optimizer=torch.optim.AdamW(student.parameters()), loss=loss)
    refuses(meshc.MeshcError, "on_steps.py", lambda: meshc.compile(step, mesh, args=(X, X)))


@ROWS.row("rates by step of a saved program at work", line="meshc run PATH --numbers rates.jsonl", mesh="dp=2")
def numbers_by_step(mesh: Any) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1), loss=F.mse_loss)
    target = torch.ones(6, 4, dtype=torch.float64)
    program = meshc.compile(step, mesh, args=(X,), kwargs={"target": target})
    folder = shared_folder()
    program.save(folder / "step.meshc")
    if torch.distributed.get_rank() == 0:
        save_file({"input": X, "target": target}, folder / "batch.safetensors")
        (folder / "rates.jsonl").write_text('{"step": 0, "lr": 0.1}\n{"step": 1, "lr": 0.02}\n')
    batches = ["batch.safetensors"] * 3
    command = ("-m", "meshc", "run", "step.meshc", "--inputs", *batches, "--outputs", "out", "--numbers", "rates.jsonl")
    under_torchrun(*command, folder=folder)
    losses, optimizer = [], torch.optim.AdamW(twin.parameters())
    for rate in (0.1, 0.02, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        loss = F.mse_loss(twin(X), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = [row["loss"] for row in json.loads((folder / "out" / "metrics.json").read_text())]
    torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
