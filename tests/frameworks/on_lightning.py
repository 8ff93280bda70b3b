"""A compiled module under Lightning and its Fabric. Each function is a row."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as OfFabric
from lightning.pytorch.callbacks import EarlyStopping, StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

import meshc
from tests.frameworks.on_torch import X, compiled, mlp
from tests.frameworks.rows import Rows, refuses, same, same_parameters, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("lightning")
STRATEGY = "strategy=ModelParallelStrategy(parallelize_fn=lambda module, mesh: module)"
IN_LIGHTNING = "strategy=ModelParallelStrategy(), and meshc.compile in configure_model"


def steps_of(twin: torch.nn.Module, steps: int, clip: float | None = 0.5) -> list[float]:
    """On one device; the losses."""
    optimizer, losses = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = twin(X).square().sum()
        loss.backward()
        if clip is not None:
            clip_grad_norm_(twin.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def steps_by(fabric: Any, model: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        fabric.backward(model(X).square().sum())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()


@ROWS.row("Fabric: setup, backward, clip_gradients, save, load", line=STRATEGY)
def by_fabric(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    strategy = OfFabric(parallelize_fn=lambda module, mesh: module, data_parallel_size=1, tensor_parallel_size=2)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    folder = shared_folder()
    steps_by(fabric, wrapped, optimizer, 2)
    fabric.save(folder / "state", {"model": wrapped, "optimizer": optimizer})
    steps_by(fabric, wrapped, optimizer, 1)
    fabric.load(folder / "state", {"model": wrapped, "optimizer": optimizer})
    steps_of(twin, 2)
    same_parameters(model, twin)
    same(wrapped(X), twin(X))


DEALT = "ModelParallelStrategy(parallelize_fn=..., data_parallel_size=2, tensor_parallel_size=1)"


@ROWS.row('Fabric\'s loaders, inputs="local" (without sizes all ranks of a node read the same rows: a warning)', line=DEALT, mesh="dp=2")
def dealt_by_fabric(mesh: Any) -> None:
    data = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(16, 8)
    for sizes, steps in ({}, 8), ({"data_parallel_size": 2, "tensor_parallel_size": 1}, 4):
        model = mlp()
        twin = copy.deepcopy(model)
        meshc.compile(model, mesh, args=(data[:2],), inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
        fabric = Fabric(accelerator="cpu", devices=2, strategy=OfFabric(parallelize_fn=lambda module, mesh: module, **sizes))
        fabric.launch()
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            batches = list(fabric.setup_dataloaders(DataLoader(data, batch_size=2)))
            for batch in batches:
                optimizer.zero_grad()
                fabric.backward(wrapped(batch).square().mean())
                optimizer.step()
        told = [str(one.message) for one in seen if "have passed the same inputs" in str(one.message)]
        assert len(batches) == steps and [DEALT.partition("..., ")[2] in one for one in told] == [True] * (not sizes), told
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        for batch in data.split(4 if sizes else 2):
            plain.zero_grad()
            twin(batch).square().mean().backward()
            plain.step()
        same_parameters(model, twin)


@ROWS.row("Fabric that knows of one device only", line="Fabric(devices=1), on each of torchrun's ranks")
def by_fabric_alone(mesh: Any) -> None:
    model, twin, _ = compiled(mesh)
    fabric = Fabric(accelerator="cpu", devices=1)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps_by(fabric, wrapped, optimizer, 2)
    steps_of(twin, 2)
    same_parameters(model, twin)


class Module(lightning.LightningModule):
    """Compiled in `configure_model`, where Lightning has models split."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.net, self.mesh, self.losses = mlp(), mesh, []  # type: ignore[var-annotated]
        self.program: Any = None

    def configure_model(self) -> None:
        if self.program is None:
            self.program = meshc.compile(self.net, self.mesh, args=(X,))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().sum()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validated", self.net(batch).square().sum())

    def test_step(self, batch: Any, index: int) -> None:
        self.log("tested", self.net(batch).square().sum())

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        predicted: torch.Tensor = self.net(batch)
        return predicted

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lightning_trainer(folder: Any, **given: Any) -> lightning.Trainer:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    quiet: dict[str, Any] = dict(enable_progress_bar=False, enable_model_summary=False, logger=False, num_sanity_val_steps=0)
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    return lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=str(folder), **quiet, **given)


@ROWS.row("Lightning's Trainer: fit, validate, checkpoints", line=IN_LIGHTNING)
def by_trainer(mesh: Any) -> None:
    folder = shared_folder()
    module, twin = Module(mesh), mlp()
    trainer = lightning_trainer(folder, max_steps=3, gradient_clip_val=0.5)
    loader = DataLoader(X, batch_size=6)
    trainer.fit(module, loader)
    wanted = steps_of(twin, 3)
    assert all(abs(one - other) < 1e-9 for one, other in zip(module.losses, wanted, strict=True))
    same_parameters(module.net, twin)
    (told,) = trainer.validate(module, loader, verbose=False)
    assert abs(told["validated"] - twin(X).square().sum().item()) < 1e-6
    trainer.save_checkpoint(folder / "state")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer.strategy.load_checkpoint(folder / "state")
    same_parameters(module.net, twin)


def accumulated_on(twin: torch.nn.Module, steps: int) -> None:
    """Two batches a step, by their mean, as Lightning accumulates."""
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        for batch in (X[:3], X[3:]):
            (twin(batch).square().sum() / 2).backward()
        optimizer.step()


@ROWS.row("its Trainer: accumulate_grad_batches", line=IN_LIGHTNING)
def accumulated(mesh: Any) -> None:
    module, twin = Module(mesh), mlp()
    lightning_trainer(shared_folder(), max_steps=2, accumulate_grad_batches=2).fit(module, DataLoader(X, batch_size=3))
    accumulated_on(twin, 2)
    same_parameters(module.net, twin)


@ROWS.row("its Trainer: resume from a checkpoint (ckpt_path)", line=IN_LIGHTNING)
def resumed(mesh: Any) -> None:
    folder, loader = shared_folder(), DataLoader(X, batch_size=6)
    first = lightning_trainer(folder, max_steps=2)
    first.fit(Module(mesh), loader)
    first.save_checkpoint(folder / "state")
    module, twin = Module(mesh), mlp()
    second = lightning_trainer(folder, max_steps=4)
    second.fit(module, loader, ckpt_path=str(folder / "state"))
    wanted = steps_of(twin, 4, clip=None)
    assert second.global_step == 4
    assert all(abs(one - other) < 1e-9 for one, other in zip(module.losses, wanted[2:], strict=True))
    same_parameters(module.net, twin)


class Halved(Module):
    """Its rate is halved after each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@ROWS.row("its Trainer: schedulers and EarlyStopping", line=IN_LIGHTNING)
def scheduled_and_stopped(mesh: Any) -> None:
    module, twin = Halved(mesh), mlp()
    stopping = EarlyStopping("loss", mode="max", patience=2)  # the loss falls, so the first is the best
    trainer = lightning_trainer(shared_folder(), max_epochs=9, callbacks=[stopping])
    trainer.fit(module, DataLoader(X, batch_size=6))
    assert trainer.global_step == 3
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        twin(X).square().sum().backward()
        optimizer.step()
        schedule.step()
    same_parameters(module.net, twin)


@ROWS.row("its Trainer: test and predict", line=IN_LIGHTNING)
def tested_and_predicted(mesh: Any) -> None:
    module, twin, loader = Module(mesh), mlp(), DataLoader(X, batch_size=3)
    trainer = lightning_trainer(shared_folder(), max_steps=1)
    (told,) = trainer.test(module, loader, verbose=False)
    wanted = [twin(batch) for batch in (X[:3], X[3:])]
    assert abs(told["tested"] - sum(each.square().sum().item() for each in wanted) / 2) < 1e-6
    for mine, theirs in zip(trainer.predict(module, loader), wanted, strict=True):
        same(mine, theirs)


@ROWS.row("its StochasticWeightAveraging callback", line=IN_LIGHTNING)
def by_callback(mesh: Any) -> None:
    class Recording(Module):
        def on_train_epoch_start(self) -> None:
            weights.append([one.full_tensor().detach() for one in self.net.parameters()])

    weights: list[list[torch.Tensor]] = []
    module, averaging = Recording(mesh), StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)
    lightning_trainer(shared_folder(), max_epochs=3, callbacks=[averaging]).fit(module, DataLoader(X, batch_size=6))
    for one, *each in zip(module.net.parameters(), *weights[:3], strict=True):
        same(one, torch.stack(each).mean(0))


@ROWS.row("strategies that wrap the model (ddp)", refused=STRATEGY)
def by_ddp(mesh: Any) -> None:
    model, _, _ = compiled(mesh)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refuses(RuntimeError, "doesn't have any parameter that requires a gradient", lambda: fabric.setup(model, optimizer))


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
