"""Fine-tunes a stock causal model by LoRA: PEFT's adapters are trained, the model itself stays as it is, and lies split over the ranks.

    python examples/finetune_lora.py                                               on one device
    torchrun --standalone --nproc-per-node 2 examples/finetune_lora.py             the same on two, each of which holds half of the model

Without `--weights` the model is a small Llama with random weights. The text is tokenised by byte.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import meshc

TEXT = Path(__file__).parent / "data" / "constitution.txt"
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets both


def build_model(weights: str | None, width: int, rank: int) -> Any:
    """The model with adapters, of which alone the parameters are trained. They are there before it is compiled."""
    torch.manual_seed(0)
    if weights:
        base = AutoModelForCausalLM.from_pretrained(weights)
    else:
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4, "num_key_value_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes))
    return get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


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
    parser.add_argument("--weights", help="what to begin with: a folder that save_pretrained has written, or a name of the hub")
    parser.add_argument("--out", type=Path, help="a folder for the adapter, which PEFT reads")
    parser.add_argument("--width", type=int, default=128, help="of the model with random weights")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters' matrices")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--seq", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args(arguments)

    model = build_model(options.weights, options.width, options.rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    if RANK == 0:
        model.print_trainable_parameters()
    if RANKS > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        step = program = meshc.compile(meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0), mesh)
    else:
        step = plain_step(model, optimizer)

    text = torch.tensor(list(TEXT.read_bytes()))
    draws = torch.Generator().manual_seed(0)  # the same batches on every rank
    losses = []
    for number in range(options.steps):
        starts = torch.randint(len(text) - options.seq, (options.batch,), generator=draws)
        ids = torch.stack([text[start : start + options.seq] for start in starts.tolist()])
        losses.append(step(input_ids=ids, labels=ids).item())
        if RANK == 0 and (number % 5 == 0 or number == options.steps - 1):
            print(f"step {number:3d}  loss {losses[-1]:.4f}", flush=True)

    if RANKS > 1 and RANK == 0:
        frozen = next(layer for layer in model.modules() if hasattr(layer, "base_layer")).base_layer.weight
        print(f"a frozen weight {list(frozen.shape)} lies here as {list(frozen.to_local().shape)}")
    if options.out:
        (program if RANKS > 1 else model).save_pretrained(options.out)
    if RANKS > 1:
        dist.barrier()  # a rank that left early would look like one that died
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
