"""The loop of litgpt's pretrain.py (docs/scripts.md), reduced, beside the same under DDP and on one device. Each function is a row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy
from torch import Tensor
from torch.utils.data import DataLoader

import meshc
from tests.frameworks.rows import Rows, same_parameters, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("litgpt")
SIZED = "ModelParallelStrategy(parallelize_fn=lambda model, mesh: model, data_parallel_size=..., tensor_parallel_size=...)"
STRATEGY = f"{SIZED}, and meshc.compile in place of torch.compile"
TEXT: Any = torch.randint(32, (24, 9), generator=torch.Generator().manual_seed(3))
ACCUMULATED = 2


def llama() -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(block_size=8, n_layer=2, n_embd=16, n_head=2, n_query_groups=1, padded_vocab_size=32, intermediate_size=24)
    kinds: dict[str, Any] = dict(rotary_percentage=1.0, parallel_residual=False, norm_class_name="LayerNorm", mlp_class_name="LLaMAMLP")
    return GPT(Config(name="llama", bias=False, **sizes, **kinds)).double()


@torch.no_grad()
def validated(model: Any, loader: Any) -> Tensor:
    model.eval()
    losses = [chunked_cross_entropy(model(rows[:, :8].contiguous()), rows[:, 1:].contiguous()) for rows in loader]
    model.train()
    return torch.stack(losses).mean()


def trained(strategy: Any, model: Any, file: Path | None, resumed: bool) -> Tensor:
    """Losses of this rank's rows, of training and validation; `file` is written at the end, or begun with."""
    fabric = Fabric(accelerator="cpu", devices=1 if strategy == "auto" else 2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(model)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader, held_out = fabric.setup_dataloaders(DataLoader(TEXT, batch_size=2), DataLoader(TEXT.flip(1)[:8], batch_size=2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if resumed and file is not None:
        fabric.load(file, state)
    found = [validated(model, held_out)]
    for number, rows in enumerate(loader, 1):
        accumulating = number % ACCUMULATED != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = chunked_cross_entropy(model(rows[:, :8].contiguous()), rows[:, 1:].contiguous())
            fabric.backward(loss / ACCUMULATED)
        found.append(loss.detach())
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    found.append(validated(model, held_out))
    if file is not None and not resumed:
        fabric.save(file, state)
    return torch.stack(found)


def trained_on(mesh: Any, model: GPT, file: Path | None, resumed: bool = False) -> Tensor:
    example = torch.zeros(2, 8, dtype=torch.long)
    meshc.compile(model, mesh, args=(example,), inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))
    sizes: dict[str, Any] = dict(data_parallel_size=mesh["dp"].size(), tensor_parallel_size=mesh.size() // mesh["dp"].size())
    strategy = ModelParallelStrategy(parallelize_fn=lambda model, mesh: model, save_distributed_checkpoint=False, **sizes)
    return trained(strategy, model, file, resumed)


@ROWS.row("pretrain's loop beside DDP: validation, accumulation, clipping; one file, and all resume", line=STRATEGY, mesh="dp=2")
def by_pretrain(mesh: Any) -> None:
    folder = shared_folder()
    for resumed in (False, True):
        model = llama()
        twin = copy.deepcopy(model)
        wanted = trained("ddp", twin, folder / "ddp.pth", resumed)
        found = trained_on(mesh, model, folder / "compiled.pth", resumed)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=0)
        same_parameters(model, twin)
    held = torch.load(folder / "compiled.pth")["model"]
    assert {type(value) for value in held.values()} == {Tensor}


@ROWS.row("the same loop where ranks share a part of the batch, beside one device", line=STRATEGY, mesh="dp=1,tp=2")
def by_pretrain_split(mesh: Any) -> None:
    model = llama()
    twin = copy.deepcopy(model)
    found = trained_on(mesh, model, None)
    torch.testing.assert_close(found, trained("auto", twin, None, False), rtol=1e-9, atol=0)
    same_parameters(model, twin)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
