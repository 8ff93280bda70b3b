"""The loop of nanoGPT's train.py (docs/scripts.md), reduced, beside the same under DDP and on one device. Each function is a row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import meshc
from tests.frameworks.rows import Rows, same_parameters, shared_folder
from tests.processes.session import run_checks

ROWS = Rows("nanogpt")
COMPILED = 'meshc.compile(model, mesh, args=(x, y), inputs="local"), before the optimizer, in place of DDP(model)'
SPLIT = 'seed_offset = mesh.get_local_rank("dp"), of parts only as many as dp has'
TEXT = torch.randint(24, (400,), generator=torch.Generator().manual_seed(3))
LENGTH, ROWS_A_PART, MICRO = 8, 2, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        normal = F.layer_norm(x, self.scale.shape, self.scale, None)
        q, k, v = (part.view(rows, length, 2, width // 2).transpose(1, 2) for part in self.qkv(normal).split(width, dim=2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width))
        mixed: Tensor = x + self.down(F.gelu(self.up(x)))
        return mixed


class Words(nn.Module):
    """A model that returns its logits and its loss, over one matrix for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.blocks = nn.Embedding(LENGTH, 16), nn.ModuleList([Block(16) for _ in range(2)])
        self.words, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(ids) + self.places(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def words() -> Words:
    torch.manual_seed(0)
    return Words().double()


def batch() -> tuple[Tensor, Tensor]:
    at = torch.randint(len(TEXT) - LENGTH, (ROWS_A_PART,)).tolist()
    return torch.stack([TEXT[i : i + LENGTH] for i in at]), torch.stack([TEXT[i + 1 : i + 1 + LENGTH] for i in at])


@torch.no_grad()
def evaluated(model: Any) -> float:
    model.eval()
    found = sum(model(*batch())[1].item() for _ in range(2)) / 2
    model.train()
    return found


def trained(model: Any, raw: nn.Module, place: int, file: Path, begin: int) -> Iterator[float]:
    """Losses of three steps and of what is evaluated before each; rank 0 writes `file`, and from step 3 on all begin with what it holds."""
    torch.manual_seed(1337 + place + begin)
    matrices, others = ([p for p in raw.parameters() if (p.dim() > 1) == decays] for decays in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    if begin:
        optimizer.load_state_dict(torch.load(file)["optimizer"])
    x, y = batch()
    for step in range(begin, begin + 3):
        for group in optimizer.param_groups:
            group["lr"] = 0.001 + 0.005 * (1 + math.cos(math.pi * step / 6))
        yield evaluated(model)
        for micro in range(MICRO):
            model.require_backward_grad_sync = micro == MICRO - 1
            _, loss = model(x, y)
            loss = loss / MICRO
            x, y = batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item() * MICRO
    if dist.get_rank() == 0 and file.suffix:
        torch.save({"model": raw.state_dict(), "optimizer": optimizer.state_dict()}, file)
    dist.barrier()


def compiled(mesh: Any) -> Words:
    model = words()
    example = torch.zeros(ROWS_A_PART, LENGTH, dtype=torch.long)
    meshc.compile(model, mesh, args=(example, example), inputs="local")
    return model


@ROWS.row("nanoGPT's loop beside DDP: evaluation, accumulation, clipping, decay; rank 0 saves, all resume", line=COMPILED, mesh="dp=2")
def by_nanogpt(mesh: Any) -> None:
    folder, place = shared_folder(), mesh.get_local_rank("dp")
    for begin in (0, 3):
        twin, model = words(), compiled(mesh)
        if begin:
            twin.load_state_dict(torch.load(folder / "ddp.pt")["model"])
            model.load_state_dict(torch.load(folder / "compiled.pt")["model"])
        wanted = torch.tensor([*trained(DistributedDataParallel(twin), twin, place, folder / "ddp.pt", begin)], dtype=torch.float64)
        dist.all_reduce(wanted)
        found = torch.tensor([*trained(model, model, place, folder / "compiled.pt", begin)], dtype=torch.float64)
        torch.testing.assert_close(found, wanted / 2, rtol=1e-9, atol=0)
        same_parameters(model, twin)


@ROWS.row("the same loop where ranks share a part of the batch, beside one device", line=SPLIT, mesh="dp=1,tp=2")
def by_nanogpt_split(mesh: Any) -> None:
    twin, model = words(), compiled(mesh)
    wanted = [*trained(twin, twin, 0, Path("unwritten"), 0)]
    torch.testing.assert_close([*trained(model, model, 0, Path("unwritten"), 0)], wanted, rtol=1e-9, atol=0)
    same_parameters(model, twin)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
