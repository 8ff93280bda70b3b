"""Compiled models in the loop of diffusers' unconditional training script: losses, averages and checkpoints are those of it under DDP. Each
function is a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

import meshc
from tests.frameworks.on_accelerate import accelerator
from tests.frameworks.rows import Rows, shared_folder
from tests.processes.session import run_checks
from tests.zoo.libraries.stubs import put_stubs

put_stubs()
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel  # noqa: E402  # imports torchvision
from diffusers.optimization import get_scheduler  # noqa: E402
from diffusers.training_utils import EMAModel  # noqa: E402

ROWS = Rows("diffusers")
EXAMPLE = (torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))
LINE = 'program = meshc.compile(model, mesh, args=..., inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean")))'
IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def unet() -> Any:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8, block_out_channels=(8,), layers_per_block=1, norm_num_groups=2, down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",), attention_head_dim=4,
    )  # fmt: skip


class Job:
    """What the script makes, in its order. mesh: None for DDP. parts, place: how batches are dealt out, and which are this rank's."""

    def __init__(self, mesh: Any, parts: int, place: int) -> None:
        self.accelerator = accelerator(gradient_accumulation_steps=2)
        self.accelerator.register_save_state_pre_hook(self.save_model)
        self.accelerator.register_load_state_pre_hook(self.load_model)
        self.plain = model = unet()
        self.average = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
        self.program = None if mesh is None else self.compiled(mesh)
        self.noise = DDPMScheduler(num_train_timesteps=100)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        loader: Any = DataLoader(IMAGES, batch_size=4 // parts)  # type: ignore[arg-type]
        if parts < dist.get_world_size():
            self.accelerator.prepare_data_loader = lambda one, **_: prepare_data_loader(one, num_processes=parts, process_index=place)
        schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=16)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.schedule = self.accelerator.prepare(schedule) if parts == dist.get_world_size() else schedule
        torch.manual_seed(place)  # of what each draws for its own images

    def compiled(self, mesh: Any) -> Any:
        return meshc.compile(
            self.plain, mesh, args=EXAMPLE, inputs="local", options=meshc.Options(local_inputs=meshc.LocalInputs(loss="mean"))
        )

    def save_model(self, models: Any, weights: list[Any], folder: str) -> None:
        if self.accelerator.is_main_process:
            self.average.save_pretrained(str(Path(folder, "average")))
            models[0].save_pretrained(str(Path(folder, "unet")))
            weights.pop()

    def load_model(self, models: list[Any], folder: str) -> None:
        self.average.load_state_dict(EMAModel.from_pretrained(str(Path(folder, "average")), UNet2DModel).state_dict())
        models.pop().load_state_dict(UNet2DModel.from_pretrained(folder, subfolder="unet").state_dict())

    def epoch(self) -> list[float]:
        losses = []
        self.model.train()
        for images in self.loader:
            noise, times = torch.randn(images.shape), torch.randint(0, 100, (len(images),))
            with self.accelerator.accumulate(self.model):
                loss = F.mse_loss(self.model(self.noise.add_noise(images, noise, times), times).sample, noise)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.average.step(self.model.parameters())
            losses.append(loss.item())
        total = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / dist.get_world_size()).tolist()

    def samples(self) -> torch.Tensor:
        """Of the average, by the main process's own model, which is like the one that is trained."""
        state = self.plain.state_dict() if self.program is None else self.program.state_dict(full=True).get("model")
        if not self.accelerator.is_main_process:
            return torch.zeros(2, 8, 8, 3)
        alone = UNet2DModel.from_config(self.plain.config)
        alone.load_state_dict(state)
        self.average.copy_to(alone.parameters())
        pipeline = DDPMPipeline(unet=alone, scheduler=self.noise)
        pipeline.set_progress_bar_config(disable=True)
        drawn = torch.Generator().manual_seed(0)
        return torch.from_numpy(pipeline(generator=drawn, batch_size=2, num_inference_steps=2, output_type="np").images)


def same_average(mine: Job, other: Job) -> None:
    for one, wanted in zip(mine.average.shadow_params, other.average.shadow_params, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


@ROWS.row(
    "train_unconditional.py: noise of each rank, accumulation, clipping, EMAModel, save_state in the main process, samples",
    line=LINE, mesh="dp=2",
)  # fmt: skip
def trained(mesh: Any) -> None:
    """The main process saves alone, and what it writes the job under DDP resumes, and the other way round."""
    folder, rank = shared_folder(), dist.get_rank()
    found: dict[str, list[float]] = {}
    jobs: dict[str, Job] = {}
    for name, given in (("ddp", None), ("meshc", mesh)):
        job = jobs[name] = Job(given, 2, rank)
        found[name] = job.epoch()
        if job.accelerator.is_main_process:
            job.accelerator.save_state(str(folder / name))
        torch.manual_seed(7 + rank)
        found[name] += job.epoch()
        torch.testing.assert_close(job.samples(), jobs["ddp"].samples(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["meshc"], found["ddp"], rtol=1e-5, atol=1e-6)
    same_average(jobs["meshc"], jobs["ddp"])
    for name, given in (("meshc", None), ("ddp", mesh)):
        job = Job(given, 2, rank)
        job.accelerator.load_state(str(folder / name))
        torch.manual_seed(7 + rank)
        torch.testing.assert_close(job.epoch(), found["ddp"][4:], rtol=1e-5, atol=1e-6)


DEALT = (
    'accelerator.prepare_data_loader = lambda loader, **_: prepare_data_loader(loader, num_processes=mesh["dp"].size(), '
    'process_index=mesh.get_local_rank("dp"))'
)


@ROWS.row("the same on other meshes", line=DEALT, mesh="dp=1,tp=2")
def trained_split(mesh: Any) -> None:
    """Beside one device, with its whole batch; ranks that share a part draw the same noise."""
    plain, mine = unet(), Job(mesh, 1, 0)
    wanted, noise = [], mine.noise
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=16)
    torch.manual_seed(0)
    for number, images in enumerate(DataLoader(IMAGES, batch_size=4)):  # type: ignore[arg-type]  # which draws too
        drawn, times = torch.randn(images.shape), torch.randint(0, 100, (4,))
        loss = F.mse_loss(plain(noise.add_noise(images, drawn, times), times).sample, drawn)
        (loss / 2).backward()
        wanted.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    torch.manual_seed(0)
    torch.testing.assert_close(mine.epoch(), wanted, rtol=1e-5, atol=1e-6)


def run(mesh: str, *names: str) -> None:
    run_checks([row.check for row in ROWS], mesh, names)
