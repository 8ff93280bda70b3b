"""Trains a small Llama, straight from transformers, on a 2x2 mesh of CPU ranks, and then once more on one device to compare.

    torchrun --standalone --nproc-per-node 4 examples/train_llama.py

The text is tokenised by byte. The script fails if the two runs' losses differ by more than `TOLERANCE` at any step.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM

import meshc

TEXT = Path(__file__).parent / "data" / "constitution.txt"
CLIP_GRAD_NORM = 1.0
TOLERANCE = 1e-3  # float32 sums in another order, carried through the optimizer for some tens of steps


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config)


def build_optimizer(model: LlamaForCausalLM, steps: int) -> tuple[AdamW, LambdaLR]:
    """AdamW whose learning rate rises for three steps and then follows half a cosine down."""

    def scale(step: int) -> float:
        return min((step + 1) / 3, 0.5 * (1 + math.cos(math.pi * step / steps)))

    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return optimizer, LambdaLR(optimizer, scale)


def batches(steps: int, batch: int, seq: int) -> Iterator[Tensor]:
    """Token ids [batch, seq] from random places of the text; the same sequence on every rank and every call."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - seq, (batch,), generator=generator)
        yield torch.stack([text[start : start + seq] for start in starts.tolist()])


def train_on_mesh(program: meshc.Program, scheduler: LambdaLR, data: list[Tensor], rank: int) -> list[float]:
    losses = []
    for step, ids in enumerate(data):
        start = time.perf_counter()
        loss = program(input_ids=ids, labels=ids)
        scheduler.step()
        losses.append(loss.item())
        if rank == 0:
            tokens_per_s = ids.numel() / (time.perf_counter() - start)
            metrics = program.metrics
            print(
                f"step {step:3d}  loss {losses[-1]:.4f}  grad norm {float(metrics['grad_norm']):.3f}  "
                f"lr {float(metrics['lr'][0]):.2e}  {tokens_per_s:6.0f} tokens/s",
                flush=True,
            )
    return losses


def train_on_one_device(model: LlamaForCausalLM, data: list[Tensor]) -> list[float]:
    """The same steps in plain PyTorch."""
    optimizer, scheduler = build_optimizer(model, len(data))
    losses = []
    for ids in data:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(on_mesh: list[float], on_one_device: list[float]) -> bool:
    """Prints how far the two runs are apart; True if that is within the tolerance."""
    # torch's maximum, unlike Python's, lets a NaN through wherever it stands.
    difference = (torch.tensor(on_mesh) - torch.tensor(on_one_device)).abs().max().item()
    print(f"final loss on the mesh        {on_mesh[-1]:.6f}")
    print(f"final loss on one device      {on_one_device[-1]:.6f}")
    print(f"largest difference of a step  {difference:.1e} (allowed {TOLERANCE:.0e})", flush=True)
    return difference <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over the whole mesh")
    parser.add_argument("--seq", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--plan", help="a recipe or plan, or auto for a search; by default what the axes' names stand for")
    options = parser.parse_args()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = dist.get_rank()
    data = list(batches(options.steps, options.batch, options.seq))
    model = build_model()
    same_start = copy.deepcopy(model) if rank == 0 else None

    optimizer, scheduler = build_optimizer(model, options.steps)
    step = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=CLIP_GRAD_NORM)
    program = meshc.compile(step, mesh, plan=options.plan)
    losses = train_on_mesh(program, scheduler, data, rank)

    agree = True
    if same_start is not None:
        print(f"\n{program.summary()}\n\ntraining the same model on one device ...", flush=True)
        agree = compare(losses, train_on_one_device(same_start, data))
    dist.barrier()  # a rank that left early would look like one that died
    dist.destroy_process_group()
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
