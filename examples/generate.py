"""Generates with a small Llama, straight from transformers, split over two CPU ranks, and with the same model on one device to compare.

    torchrun --standalone --nproc-per-node 2 examples/generate.py

The model has random weights and its text is made of bytes; what matters is that the model's own `generate` runs as it always does, greedy,
drawn and in beams, and gives the same tokens. The script fails if it does not.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import meshc

PROMPTS = ("We the People of the United States, in Order", "The Congress shall have")
WAYS: dict[str, dict[str, object]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 2},
}


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def tokens() -> dict[str, Tensor]:
    """Prompts as bytes, filled up in front."""
    rows = [list(text.encode()) for text in PROMPTS]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=24, help="tokens to generate")
    new = parser.parse_args().new
    dist.init_process_group("gloo")
    model = build_model()
    plain = copy.deepcopy(model)
    program = meshc.compile(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    same = True
    for way, asked in WAYS.items():
        found = []
        for one in (model, plain):  # the compiled model is called as ever
            torch.manual_seed(1)  # on every rank: draws are torch's own
            start = time.perf_counter()
            found.append(one.generate(**tokens(), max_new_tokens=new, **{"do_sample": False, **asked}))
            took = time.perf_counter() - start
            if dist.get_rank() == 0:
                print(f"{way}, {'split' if one is model else 'plain'}: {took:.1f} s, {found[-1][0, -8:].tolist()}")
        same = same and torch.equal(*found)

    cache = DynamicCache()  # held over two calls, split as the program reads it
    program.generate(**tokens(), max_new_tokens=4, do_sample=False, cache=cache)
    if dist.get_rank() == 0:
        print(f"a cache of {cache.get_seq_length()} tokens: a layer's keys are {tuple(cache.layers[0].keys.to_local().shape)} here")
        print("the same tokens" if same else "OTHER TOKENS")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
