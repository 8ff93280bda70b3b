"""Trains a small GPT-2, straight from transformers, as a pipeline: its layers lie on one rank after the other, and microbatches go through.

    python examples/train_pipeline.py                                               on one device
    torchrun --standalone --nproc-per-node 2 examples/train_pipeline.py             the same on two, each of which has half of the layers

The model is not cut by hand: an axis called `pp` is enough. What is printed says where it was cut. The text is tokenised by byte.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPT2Config, GPT2LMHeadModel

import meshc

TEXT = Path(__file__).parent / "data" / "constitution.txt"
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets both


def build_model(layers: int, width: int, seq: int) -> GPT2LMHeadModel:
    """Without dropout, so that one device draws nothing that a mesh would draw otherwise."""
    torch.manual_seed(0)
    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "n_positions": seq, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """What the step means, in plain PyTorch."""

    def step(**batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def main(arguments: list[str] | None = None) -> list[float]:
    """Trains; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", help="1f1b, gpipe, ...; by default the one that is predicted to be fastest")
    parser.add_argument("--microbatches", type=int, default=4, help="parts that the batch goes through the pipeline in")
    parser.add_argument("--timeline", help="a file for a picture of what each rank does when: timeline.svg")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)

    model = build_model(options.layers, options.width, options.seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if RANKS > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
        train = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0, microbatches=options.microbatches)
        step = program = meshc.compile(train, mesh, options=meshc.Options(pipeline=meshc.Pipelining(schedule=options.schedule)))
    else:
        step = plain_step(model, optimizer)

    text = torch.tensor(list(TEXT.read_bytes()))
    draws = torch.Generator().manual_seed(0)  # the same batches on every rank
    losses = []
    for number in range(options.steps):
        starts = torch.randint(len(text) - options.seq, (options.batch,), generator=draws)
        ids = torch.stack([text[start : start + options.seq] for start in starts.tolist()])
        losses.append(step(input_ids=ids, labels=ids).item())
        if number == 0 and RANKS > 1 and RANK == 0:
            summary = program.summary()  # placements, communication, memory, times; here the part about stages
            print(next(part for part in summary.split("\n\n") if part.startswith("pipeline")) + "\n")
            if options.timeline:
                program.timeline(options.timeline)
        if RANK == 0 and (number % 5 == 0 or number == options.steps - 1):
            print(f"step {number:3d}  loss {losses[-1]:.4f}", flush=True)

    if RANKS > 1:
        dist.barrier()  # a rank that left early would look like one that died
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
