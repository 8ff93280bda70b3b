"""A compiled module under Accelerate. Each function is a row."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import meshc
from tests.frameworks.on_torch import X, compiled, mlp
from tests.frameworks.rows import Rows, same, same_parameters, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("accelerate")
LOCAL: dict[str, Any] = {"inputs": "local", "options": meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))}


def accelerator(**kwargs: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, **kwargs)


@ROWS.row("backward, accumulate, clip_grad_norm_, optimizers and schedulers")
def a_loop(mesh: Any) -> None:
    """With the same batch on every rank the loader stays as it is; `split_batches` lets a scheduler step once a step."""
    ours = accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, twin, _ = compiled(mesh)
    model = ours.prepare(model)
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


@ROWS.row("gradient_accumulation_steps, with accumulate")
def accumulated(mesh: Any) -> None:
    """Of four batches two make a step, by their mean."""
    ours = accelerator(gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, twin, _ = compiled(mesh)
    model = ours.prepare(model)
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


@ROWS.row('a loader that deals batches out, with inputs="local"', mesh="dp=2")
def dealt_out(mesh: Any) -> None:
    ours = accelerator()
    model = mlp()
    twin = copy.deepcopy(model)
    options = meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))
    meshc.compile(model, mesh, args=(X[:2],), inputs="local", options=options)
    model = ours.prepare(model)
    optimizer, loader = ours.prepare(torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(X[:4], batch_size=2))
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in loader:
        ours.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    twin(X[:4]).square().mean().backward()
    plain.step()
    same_parameters(model, twin)


@ROWS.row("mixed_precision", mesh="dp=2")
def mixed_precision(mesh: Any) -> None:
    """It puts a forward under autocast into the instance, and that is compiled."""
    ours = accelerator(mixed_precision="bf16")
    model = mlp().float()
    twin = copy.deepcopy(model)
    x = X.float()
    meshc.compile(model, mesh, args=(x,))
    torch.testing.assert_close(model(x), twin(x))
    model = ours.prepare(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = twin(x).float()
    assert not torch.equal(wanted, twin(x)) and torch.equal(model(x), wanted)
    with ours.autocast():
        assert torch.equal(model(x), wanted)


@ROWS.row("save_state, load_state, save_model, get_state_dict (each rank needs host memory for the whole model)")
def saved(mesh: Any) -> None:
    ours = accelerator()
    model, twin, _ = compiled(mesh)
    model = ours.prepare(model)
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


SCHEDULED = "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)), or leave the scheduler out of accelerator.prepare"


@ROWS.row("a scheduler that it has prepared, where every rank has the whole batch (a warning, at the second step)", line=SCHEDULED)
def scheduled(mesh: Any) -> None:
    """It steps one once a process, unless it splits batches itself. `dp` is the mesh of the parts, on which that is as it should be."""
    parts = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for how, where, split, rates in (({}, mesh, False, 0.25), ({}, mesh, True, 0.5), (LOCAL, parts, False, 0.25)):
        ours = accelerator(dataloader_config=DataLoaderConfiguration(split_batches=split))
        model = mlp()
        meshc.compile(model, where, args=(X[:2],), **how)
        model = ours.prepare(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        prepared, scheduler = ours.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for number in range(3):
                ours.backward(model(X[:2] + number + (dist.get_rank() if how else 0)).square().mean())
                if number == 0:
                    prepared.step()
                    scheduler.step()
        told = [one for one in seen if "steps the scheduler that it has prepared 2 times" in str(one.message)]
        assert optimizer.param_groups[0]["lr"] == rates and len(told) == (rates == 0.25 and not how), [str(one.message) for one in seen]
        assert all(one.filename == __file__ for one in told)


@ROWS.row("accelerator.prepare(model, optimizer), which leaves it as it is; prepare_model(model, evaluation_mode=True), and both again")
def prepared(mesh: Any) -> None:
    for evaluation_mode in (False, True):
        ours = accelerator()
        model, _, _ = compiled(mesh)
        assert ours.prepare_model(model, evaluation_mode=evaluation_mode) is model and ours.prepare_model(model) is model
        model_again, _ = ours.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert model_again is model and len(ours._models) == 1


@ROWS.row('a loader, and gather_for_metrics, where ranks share a part of the batch, with inputs="local"', mesh="dp=1,tp=2")
def shared_parts(mesh: Any) -> None:
    """Both ranks get the same rows, of which each counts once; the last batch has fewer."""
    ours, model = accelerator(), mlp()
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh, args=(X[:2],), **LOCAL)
    loader, model = ours.prepare(DataLoader(X[:5], batch_size=2), model)
    rows = []
    with torch.no_grad():
        for batch in loader:
            rows.append(ours.gather_for_metrics((batch, {"out": model(batch)})))
    same(torch.cat([one for one, _ in rows]), X[:5])
    same(torch.cat([one["out"] for _, one in rows]), twin(X[:5]))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
