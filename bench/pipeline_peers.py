"""torch.distributed.pipelining on the same decoder, as a careful user would write it.

    rank 0: embeddings and the first half of the blocks          rank 1: the others, the last norm, head and loss

The decoder's head is tied to its embedding, which torch's stages do not know: each rank has a copy, and the gradients of the two are added
up after the last microbatch. Microbatches are equally large, so that the mean of their losses is the batch's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import VOCAB, Batch, Decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class First(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.wte, self.wpe = model.wte, model.wpe
        self.h = nn.ModuleList(list(model.h)[: len(model.h) // 2])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return x


class Last(nn.Module):
    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.h = nn.ModuleList(list(model.h)[len(model.h) // 2 :])
        self.ln_f, self.lm_head = model.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


class Pipelined:
    """`step(batch)` trains on a global batch; the loss comes back on both ranks, as meshc's does."""

    def __init__(self, model: Decoder, plan: str, mesh: DeviceMesh, compiled: bool, adamw: dict[str, float]) -> None:
        kind, count = plan.split("-")
        self.first = dist.get_rank() == 0
        self.half = First(model) if self.first else Last(model)
        self.tied = model.wte.weight
        self.optimizer = torch.optim.AdamW(self.half.parameters(), fused=True, **adamw)
        module = torch.compile(self.half) if compiled else self.half
        stage = PipelineStage(module, dist.get_rank(), 2, torch.device("cpu"), group=mesh.get_group())
        self.schedule = SCHEDULES[kind](stage, int(count), loss_fn=_loss)

    def step(self, batch: Batch) -> Tensor:
        if self.first:
            self.schedule.step(batch["ids"])
            loss = torch.zeros(())
        else:
            losses: list[Tensor] = []
            self.schedule.step(target=batch["targets"], losses=losses)
            loss = torch.stack([loss.detach() for loss in losses]).mean()
        dist.all_reduce(self.tied.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.broadcast(loss, 1)
        return loss
