"""TrainStep on real ranks: schedulers, metrics, the loss's arguments, optimizers, autocast; each function is one check."""

from __future__ import annotations

import copy
import os
import resource
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.runtime.run.executor import instruction_text
from tests.models import mlp, nanogpt, resnet
from tests.processes.reference import SEED, adamw, close, furthest, sgd, train
from tests.processes.session import run_checks

OPTIONS = meshc.Options(seed=SEED)


def scheduled(mesh: Any) -> None:
    """A scheduler on the user's optimizer changes the rate without compiling again; metrics and the optimizer's state can be read."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    optimizer, theirs = adamw(case.model.parameters()), adamw(twin.parameters())

    def rate(step: int) -> float:
        return 1.0 / (1 + step)

    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=0.1), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, wanted = (torch.optim.lr_scheduler.LambdaLR(one, rate) for one in (optimizer, theirs))
        for step in range(3):
            loss = program(case.kwargs["x"], target=case.target_kwargs["target"])
            ours.step()
            expected = case.loss_of(twin(**case.kwargs))
            expected.backward()
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            theirs.step()
            theirs.zero_grad()
            wanted.step()
            metrics = program.metrics
            close([loss.item(), metrics["loss"].item(), float(metrics["grad_norm"])], [expected.item(), expected.item(), norm.item()], 1e-9)
            close(metrics["lr"], [1e-2 / (1 + step)], 1e-12)
    assert len(program.compilations.kept) == 1
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 1e-2 * rate(3)
    assert len(state["state"]) == len(list(case.model.parameters()))
    assert all(type(entry["exp_avg"]) is Tensor and float(entry["step"]) == 3 for entry in state["state"].values())


def recompiled(mesh: Any) -> None:
    """An entry that Python branched on is part of the key: a change compiles again, and says why."""
    case = mlp(torch.float64)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, weight_decay=0.1)
    twin = copy.deepcopy(case.model)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, weight_decay=0.1)
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss), mesh)
    losses, wanted = [], []
    for momentum in (0.0, 0.9, 0.9):
        for one in (optimizer, theirs):
            one.param_groups[0]["momentum"] = momentum
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses.append(program(**case.call_kwargs).item())
        said = [str(w.message) for w in caught if "compiles again" in str(w.message)]
        assert (len(said) == 1 and "momentum" in said[0]) == (len(losses) == 2), said
        loss = case.loss_of(twin(**case.kwargs))
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        wanted.append(loss.item())
    close(losses, wanted, 1e-10)


def another_batch(mesh: Any) -> None:
    """A batch of another size is another compilation of the same step: it goes on with the same parameters and state. The last of an
    epoch may have one row: the first rank has it, the other padding."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    optimizer, theirs = adamw(case.model.parameters()), adamw(twin.parameters())
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss), mesh)
    losses, wanted = [], []
    for rows in (6, 6, 4, 4, 1, 6):
        batch = {name: value[:rows] for name, value in case.call_kwargs.items()}
        losses.append(program(**batch).item())
        assert f"[batch {rows}/dp, " in str(program)
        loss = case.loss(twin(batch["x"]), batch["target"])
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        wanted.append(loss.item())
    close(losses, wanted, 1e-10)
    for mine, other in zip(case.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other.detach(), rtol=1e-10, atol=1e-10)  # type: ignore[attr-defined]


def weight_decay_to_zero(mesh: Any) -> None:
    """Without decay Adam's update is another one: a compilation that says why, once."""
    case = mlp(torch.float64)
    optimizer = adamw(case.model.parameters())
    twin = copy.deepcopy(case.model)
    theirs = adamw(twin.parameters())
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss), mesh)
    messages: list[str] = []
    for decay in (0.1, 0.0, 0.0):
        for one in (optimizer, theirs):
            one.param_groups[0]["weight_decay"] = decay
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = program(**case.call_kwargs)
        messages += [str(w.message) for w in caught]
        wanted = case.loss_of(twin(**case.kwargs))
        wanted.backward()
        theirs.step()
        theirs.zero_grad()
        close([loss.item()], [wanted.item()], 1e-10)
    said = [text for text in messages if "compiles again" in text]
    assert len(said) == 1 and "weight_decay != 0: True -> False" in said[0], messages


def loss_arguments(mesh: Any) -> None:
    """Positional inputs, a loss that takes more than one keyword, and a name that both take."""
    case = mlp(torch.float64)
    start = copy.deepcopy(case.model)
    weight = torch.rand(10, dtype=torch.float64)

    def loss(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight)

    program = meshc.compile(meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=loss), mesh)
    ours = [program(case.kwargs["x"], weight=weight, **case.target_kwargs).item() for _ in range(2)]
    wanted, _, _ = train(start, lambda output: loss(output, case.target_kwargs["target"], weight), case.kwargs, sgd, clip=None)
    close(ours, wanted, 1e-10)

    def clash(output: Tensor, x: Tensor) -> Tensor:
        return (output - x).mean()

    with pytest.raises(meshc.PlanError, match="x: both model.forward and the loss take this name"):
        meshc.compile(meshc.TrainStep(start, optimizer=sgd(start.parameters()), loss=clash), mesh)


def microbatches(mesh: Any) -> None:
    """Two microbatches draw the dropout of the whole batch; gradients are reduced while the second runs."""
    case = nanogpt(torch.float64, batch=8, layers=1, dropout=0.1)
    start = copy.deepcopy(case.model)
    step = meshc.TrainStep(case.model, optimizer=sgd(case.model.parameters()), loss=lambda output: output[1], microbatches=2)
    program = meshc.compile(step, mesh, options=OPTIONS)
    ours = [program(**case.kwargs).item() for _ in range(2)]
    wanted, _, _ = train(start, case.loss_of, case.kwargs, sgd, clip=None)
    close(ours, wanted, 1e-10)
    found = messages(program, case.kwargs)
    assert found["run each 1"] > 0 and found["run each 0"] == 0, found


def messages(program: meshc.Program, kwargs: dict[str, Any]) -> Counter[str]:
    """How many messages each instruction of a call starts."""
    executor = next(iter(program.compilations.kept.values())).session.executor
    found: Counter[str] = Counter()
    now = [""]

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[now[0]] += 1
            return function(*args, **kwargs)

        return call

    def doing(instruction: Any, *rest: Any) -> None:
        now[0] = instruction_text(instruction)
        perform(instruction, *rest)

    with pytest.MonkeyPatch.context() as patch:
        perform = executor._do
        patch.setattr(executor, "_do", doing)
        for name in ("all_reduce", "all_to_all_single"):
            patch.setattr(dist, name, noting(getattr(dist, name)))
        program(**kwargs)
    return found


def mean_of_parts(mesh: Any) -> None:
    """Batch norm in each of two microbatches, over both ranks; clipped gradients; running statistics that move twice a step."""
    case = resnet(torch.float64)
    twin = copy.deepcopy(case.model)
    step = meshc.TrainStep(
        case.model, optimizer=sgd(case.model.parameters()), loss=case.loss, clip_grad_norm=0.5, microbatches=2, batch_mix="mean_of_parts"
    )
    program = meshc.compile(step, mesh)
    ours = [program(**case.call_kwargs).item() for _ in range(2)]
    theirs = sgd(twin.parameters())
    wanted = []
    for _ in range(2):
        losses = []
        for rows in (slice(0, 4), slice(4, 8)):
            losses.append(F.cross_entropy(twin(case.kwargs["images"][rows]), case.target_kwargs["target"][rows]) / 2)
            losses[-1].backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        wanted.append(sum(loss.item() for loss in losses))
    close(ours, wanted, 1e-10)
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        assert int(twin.bn.num_batches_tracked) == 4  # type: ignore[union-attr, arg-type]
        assert furthest(state["model"], twin.state_dict())[0] < 1e-9


class Autocasting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def autocast(mesh: Any) -> None:
    """bfloat16 regions around the call and in the model: the losses of plain PyTorch, and another program than without."""
    case = mlp()
    plain, _, _ = train(case.model, case.loss_of, case.kwargs, sgd, clip=None)

    def around() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    wanted, _, _ = train(case.model, case.loss_of, case.kwargs, sgd, clip=None, around=around)
    assert wanted != plain
    outer, inner = copy.deepcopy(case.model), Autocasting(copy.deepcopy(case.model))
    wanted_inside, _, _ = train(inner, case.loss_of, case.kwargs, sgd, clip=None)
    program = meshc.compile(meshc.TrainStep(outer, optimizer=sgd(outer.parameters()), loss=case.loss), mesh)
    ours = []
    for _ in range(2):
        with around():
            ours.append(program(**case.call_kwargs).item())
    close(ours, wanted, 5e-3)
    assert "bf16" in str(program)
    program = meshc.compile(meshc.TrainStep(inner, optimizer=sgd(inner.parameters()), loss=case.loss), mesh)
    close([program(**case.call_kwargs).item() for _ in range(2)], wanted_inside, 1e-2)  # the loss is bfloat16 itself
    assert "bf16" in str(program)


def dynamic_sizes(mesh: Any) -> None:
    """One compilation serves batches of several sizes, uneven ones too; one out of range is refused everywhere, and the run goes on."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    optimizer, theirs = adamw(case.model.parameters()), adamw(twin.parameters())
    batch = torch.export.Dim("batch", max=12)
    options = meshc.Options(seed=SEED, dynamic={name: {0: batch} for name in case.call_kwargs})
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss), mesh, options=options)
    losses, wanted = [], []
    for rows in (4, 7, 2, 4, 13, 5):
        inputs = {name: torch.cat([value, value, value])[:rows].clone() for name, value in case.call_kwargs.items()}
        if rows > 12:
            with pytest.raises(meshc.InputError, match="batch is 13 .*the program serves batch from 2 to 12"):
                program(**inputs)
            continue
        losses.append(program(**inputs).item())
        loss = F.cross_entropy(twin(inputs["x"]), inputs["target"])
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        wanted.append(loss.item())
    close(losses, wanted, 1e-9)
    assert len(program.compilations.general) == 1 and len(program.compilations.kept) == 4


def full_disk(mesh: Any) -> None:
    """Rank 0, which writes, has no room: all ranks have its error, nothing stays, and training goes on where it is caught."""
    case = mlp()
    program = meshc.compile(meshc.TrainStep(case.model, optimizer=adamw(case.model.parameters()), loss=case.loss), mesh)
    program(**case.call_kwargs)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    path = Path(folder[0]) / "saved"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(meshc.FileError, match="(?s)saved cannot be written: File too large.*make room there") as caught:
            program.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.everywhere and os.listdir(folder[0]) == []
    dist.barrier()
    program(**case.call_kwargs)
    program.save(path)
    assert os.listdir(folder[0]) == ["saved"] and artifact.load(path).mode == "step"


def partial_storage(mesh: Any) -> None:
    """zero1 is for a TrainStep; module mode says so. Last, since a refusal stops all ranks."""
    case = mlp()
    with pytest.raises(meshc.PlanError, match=r"compile meshc.TrainStep"):
        meshc.compile(case.model, mesh, kwargs=case.kwargs, plan="zero1")


CHECKS: tuple[Callable[[Any], None], ...] = (
    scheduled, recompiled, another_batch, weight_decay_to_zero, loss_arguments, microbatches, mean_of_parts, autocast, dynamic_sizes,
    full_disk, partial_storage,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
