"""Trains a small Mixtral, straight from transformers, whose experts lie on different ranks.

    python examples/train_moe.py                                               on one device
    torchrun --standalone --nproc-per-node 2 examples/train_moe.py             the same on two, each of which has half of the experts

Along the axis `ep` a rank has some of the experts, and of the batch a part: tokens go to the experts that they choose, and come back. A
step says how often each expert was chosen. The text is tokenised by byte.
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
from transformers import MixtralConfig, MixtralForCausalLM

import meshc

TEXT = Path(__file__).parent / "data" / "constitution.txt"
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets both


def build_model(experts: int, width: int) -> MixtralForCausalLM:
    """Each token goes to two of the experts. The router's own loss, which keeps them equally busy, counts in `loss`."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=experts, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.01,
    )  # fmt: skip
    return MixtralForCausalLM(config)


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
    parser.add_argument("--experts", type=int, default=4, help="in each layer")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, over all ranks")
    parser.add_argument("--seq", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args(arguments)

    model = build_model(options.experts, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    if RANKS > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
        step = program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0), mesh)
    else:
        step = plain_step(model, optimizer)

    text = torch.tensor(list(TEXT.read_bytes()))
    draws = torch.Generator().manual_seed(0)  # the same batches on every rank, which takes its part of them
    losses = []
    for number in range(options.steps):
        starts = torch.randint(len(text) - options.seq, (options.batch,), generator=draws)
        ids = torch.stack([text[start : start + options.seq] for start in starts.tolist()])
        losses.append(step(input_ids=ids, labels=ids).item())
        if RANK == 0 and (number % 5 == 0 or number == options.steps - 1):
            print(f"step {number:3d}  loss {losses[-1]:.4f}", flush=True)
            for layer, load in program.metrics["experts"].items() if RANKS > 1 else ():
                print(f"    {layer}: tokens of each expert {load.tokens.tolist()}, the busiest has {load.imbalance:.2f} times the mean")

    if RANKS > 1:
        if RANK == 0:
            weights = model.model.layers[0].mlp.experts.gate_up_proj
            print(f"of {weights.shape[0]} experts in a layer, {weights.to_local().shape[0]} lie here")
        dist.barrier()  # a rank that left early would look like one that died
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
