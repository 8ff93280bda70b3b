"""Compiled models in the loop of timm's training script: losses, parameters and checkpoints are those of it under DDP. Each function is a
row."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import meshc
from tests.frameworks.rows import Rows, same, same_parameters, shared_folder
from tests.processes.session import run_checks
from tests.zoo.libraries.stubs import put_stubs

put_stubs()
import timm  # noqa: E402  # imports torchvision
from timm.data import Mixup  # noqa: E402
from timm.layers import convert_sync_batchnorm  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.task import ClassificationTask, load_task_ema_checkpoint, resume_task_checkpoint  # noqa: E402
from timm.utils import CheckpointSaver, dispatch_clip_grad  # noqa: E402

ROWS = Rows("timm")
EXAMPLE = torch.zeros(4, 3, 32, 32, dtype=torch.float64)
LOCAL: dict[str, Any] = {"args": (EXAMPLE,), "inputs": "local", "options": meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))}
LINE = 'meshc.compile(model, mesh, args=..., inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))'


def images(rows: int = 24) -> TensorDataset:
    drawn = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 3, 32, 32, generator=drawn).double(), torch.randint(0, 4, (rows,), generator=drawn))


def vision_transformer() -> Any:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, img_size=32, patch_size=8, depth=1, embed_dim=48, num_heads=4)
    return model.double()


class Job:
    """What the script makes, in its order. mesh: None for DDP. parts, place: how batches are dealt out, and which are this rank's."""

    def __init__(self, mesh: Any, parts: int, place: int, resume: Path | None = None) -> None:
        self.place, self.rows = place, 8 // parts
        self.loaders = [
            DataLoader(images(), self.rows, sampler=DistributedSampler(images(), parts, place, shuffle=shuffle))
            for shuffle in (True, False)
        ]
        model = vision_transformer()
        if mesh is not None:
            meshc.compile(model, mesh, **LOCAL)
        self.task = ClassificationTask(model, SoftTargetCrossEntropy(), verbose=False)
        self.optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
        self.start = 0 if resume is None else resume_task_checkpoint(self.task, resume, self.optimizer, log_info=False)
        self.task.setup_ema(decay=0.5)
        if resume is not None:
            load_task_ema_checkpoint(self.task, resume)
        if mesh is not None:
            meshc.compile(self.task.trainable_module_ema.module, mesh, **LOCAL)
        else:
            self.task.prepare_distributed()
        self.scheduler = CosineLRScheduler(self.optimizer, t_initial=6, warmup_t=2, warmup_lr_init=1e-3, t_in_epochs=False)
        self.scheduler.step_update(max(0, 3 * self.start - 1))

    def run(self, epochs: int, folder: Path | None = None) -> list[float]:
        """Losses of training, which all ranks' rows have, and of evaluation of the model and of its average."""
        saver = None
        if folder is not None:
            saver = CheckpointSaver(self.task.trainable_module, self.optimizer, checkpoint_dir=folder, task=self.task)
        losses: list[float] = []
        for epoch in range(self.start, epochs):
            self.loaders[0].sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            np.random.seed(10 * epoch + self.place)  # what mixup draws
            losses += self.train(epoch)
            for ema in (False, True):
                model = self.task.get_eval_model(ema=ema).eval()
                with torch.inference_mode():
                    losses += [F.cross_entropy(model(x), y).item() for x, y in self.loaders[1]]
            if saver is not None:
                saver.save_checkpoint(epoch, metric=float(epoch))
        return mean_of_ranks(losses)

    def train(self, epoch: int) -> list[float]:
        mixup, losses = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=4, label_smoothing=0.1), []
        self.task.get_trainable_module().train()
        for number, (x, y) in enumerate(self.loaders[0]):
            update = number != 0  # two batches make the first step
            with nullcontext() if update else self.task.no_sync():
                loss = self.task(*mixup(x, y))["loss"] / 2
                loss.backward()
            losses.append(loss.item())
            if update:
                dispatch_clip_grad(self.task.get_clip_parameters(), 1.0, mode="norm")
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.task.update_ema(step=2 * epoch + number)
                self.scheduler.step_update(3 * epoch + number)
        return losses


def mean_of_ranks(losses: list[float]) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def same_job(mine: Job, plain: Job) -> None:
    theirs = plain.task.trainable_module.module.state_dict()
    for name, value in mine.task.trainable_module.state_dict().items():
        whole: Any = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(whole, theirs[name], rtol=1e-8, atol=1e-8)


@ROWS.row(
    "train.py: mixup, accumulation, clipping, a schedule by updates, evaluation, CheckpointSaver and --resume", line=LINE, mesh="dp=2"
)
def trained(mesh: Any) -> None:
    """Rank 0 saves alone; what it writes the job under DDP resumes, and the other way round. --model-ema takes the line a second time."""
    folder, rank = shared_folder(), dist.get_rank()
    jobs = [Job(None, 2, rank), Job(mesh, 2, rank)]
    found = []
    for name, job in zip(("ddp", "meshc"), jobs, strict=True):
        (folder / name).mkdir(exist_ok=True)
        found.append(job.run(2, folder / name if rank == 0 else None))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)
    same_job(jobs[1], jobs[0])
    dist.barrier()
    for given, name in ((mesh, "ddp"), (None, "meshc")):
        resumed = Job(given, 2, rank, folder / name / "checkpoint-0.pth.tar")
        torch.testing.assert_close(resumed.run(2), found[0][len(found[0]) // 2 :], rtol=1e-8, atol=1e-8)


DEALT = (
    'loader.sampler.__init__(loader.dataset, mesh["dp"].size(), mesh.get_local_rank("dp")); '
    "a CheckpointSaver on each rank, of its own folder"
)


@ROWS.row("the same on other meshes", line=DEALT, mesh="dp=1,tp=2")
def trained_split(mesh: Any) -> None:
    folder = shared_folder() / f"rank{dist.get_rank()}"
    folder.mkdir()
    jobs = [Job(None, 1, 0), Job(mesh, 1, 0)]  # all rows on each rank, of which DDP's mean is theirs
    found = [jobs[0].run(2), jobs[1].run(2, folder)]
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-8)
    same_job(jobs[1], jobs[0])
    resumed = Job(mesh, 1, 0, folder / "checkpoint-0.pth.tar")
    torch.testing.assert_close(resumed.run(2), found[0][len(found[0]) // 2 :], rtol=1e-8, atol=1e-8)


@ROWS.row(
    "batch norm, with --sync-bn and without: of the whole batch, as on one device; DDP's without --sync-bn is of each rank's rows",
    line=LINE, mesh="dp=2",
)  # fmt: skip
def batch_norm(mesh: Any) -> None:
    torch.manual_seed(0)
    plain: nn.Module = timm.create_model("resnet10t", num_classes=4).double()
    x, y = (one[:8] for one in images().tensors)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    for converted in (False, True):
        twin = copy.deepcopy(plain)
        model = convert_sync_batchnorm(copy.deepcopy(plain)) if converted else copy.deepcopy(plain)
        meshc.compile(model, mesh, **{**LOCAL, "args": (x[mine],)})
        for one, rows in ((model, mine), (twin, slice(None))):
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            for _ in range(2):
                F.cross_entropy(one(x[rows]), y[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
        same_parameters(model, twin)
        for name, buffer in twin.named_buffers():
            same(model.get_buffer(name), buffer)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
