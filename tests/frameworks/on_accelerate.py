"""A compiled module under Accelerate. Each function is a row."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import meshc
from tests.frameworks.on_torch import X, compiled, mlp
from tests.frameworks.rows import Rows, refuses, same, same_parameters, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("accelerate")
PREPARED = "model = accelerator.prepare_model(model, evaluation_mode=True)"


def accelerator(**kwargs: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **kwargs)


@ROWS.row("backward, accumulate, clip_grad_norm_, optimizers and schedulers", line=PREPARED)
def a_loop(mesh: Any) -> None:
    """With the same batch on every rank the loader stays as it is; `split_batches` lets a scheduler step once a step."""
    ours = accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, twin, _ = compiled(mesh)
    model = ours.prepare_model(model, evaluation_mode=True)
    optimizer, plain = (torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, twin))
    prepared, scheduler = ours.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    decay = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for _ in range(3):
        with ours.accumulate(model):
            ours.backward(model(X).square().sum())
            norm = ours.clip_grad_norm_(model.parameters(), 0.5)
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
        twin(X).square().sum().backward()
        same(norm, clip_grad_norm_(twin.parameters(), 0.5))
        plain.step()
        decay.step()
        plain.zero_grad()
    same_parameters(model, twin)
    assert ours.unwrap_model(model) is model


@ROWS.row("gradient_accumulation_steps, with accumulate", line=PREPARED)
def accumulated(mesh: Any) -> None:
    """Of four batches two make a step, by their mean."""
    ours = accelerator(gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, twin, _ = compiled(mesh)
    model = ours.prepare_model(model, evaluation_mode=True)
    optimizer, plain = ours.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), torch.optim.SGD(twin.parameters(), lr=0.1)
    for number in range(4):
        with ours.accumulate(model):
            ours.backward(model((number + 1) * X).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        (twin((number + 1) * X).square().mean() / 2).backward()
        if number % 2:
            plain.step()
            plain.zero_grad()
    same_parameters(model, twin)


@ROWS.row('a loader that deals batches out, with inputs="local"', line=PREPARED, mesh="dp=2")
def dealt_out(mesh: Any) -> None:
    ours = accelerator()
    model = mlp()
    twin = copy.deepcopy(model)
    options = meshc.Options(local_loss="mean")
    meshc.compile(model, mesh, args=(X[:2],), inputs="local", options=options)
    model = ours.prepare_model(model, evaluation_mode=True)
    optimizer, loader = ours.prepare(torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(X[:4], batch_size=2))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in loader:
        ours.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    twin(X[:4]).square().mean().backward()
    plain.step()
    same_parameters(model, twin)


@ROWS.row("mixed_precision", line=PREPARED, mesh="dp=2")
def mixed_precision(mesh: Any) -> None:
    """It puts a forward under autocast into the instance, and that is compiled."""
    ours = accelerator(mixed_precision="bf16")
    model = mlp().float()
    twin = copy.deepcopy(model)
    x = X.float()
    meshc.compile(model, mesh, args=(x,))
    torch.testing.assert_close(model(x), twin(x))
    model = ours.prepare_model(model, evaluation_mode=True)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = twin(x).float()
    assert not torch.equal(wanted, twin(x)) and torch.equal(model(x), wanted)
    with ours.autocast():
        assert torch.equal(model(x), wanted)


@ROWS.row("save_state, load_state, save_model, get_state_dict (each rank needs host memory for the whole model)", line=PREPARED)
def saved(mesh: Any) -> None:
    ours = accelerator()
    model, twin, _ = compiled(mesh)
    model = ours.prepare_model(model, evaluation_mode=True)
    optimizer = ours.prepare(torch.optim.AdamW(model.parameters(), lr=0.1))
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    folder = shared_folder()
    for number in range(3):
        if number == 1:
            ours.save_state(str(folder / "state"))
            ours.save_model(model, str(folder / "model"))
        ours.backward(model(X).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    ours.load_state(str(folder / "state"))
    for number in range(2):
        if number == 1:
            ours.backward(model(X).square().sum())
            optimizer.step()
        twin(X).square().sum().backward()
        plain.step()
        plain.zero_grad()
    same_parameters(model, twin)
    if dist.get_rank() == 0:
        written = load_file(folder / "model" / "model.safetensors")
        fresh = mlp()
        fresh.load_state_dict(written)
    whole = ours.get_state_dict(model)
    for name, value in twin.state_dict().items():
        same(whole[name], value)


@ROWS.row("accelerator.prepare(model)", refused=f"it wraps the model in DDP: {PREPARED}")
def prepared(mesh: Any) -> None:
    ours = accelerator()
    model, _, _ = compiled(mesh)
    refuses(RuntimeError, "doesn't have any parameter that requires a gradient", lambda: ours.prepare(model))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
