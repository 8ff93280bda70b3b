"""A token of a Llama of 1.2 billion parameters on one GPU, in bfloat16: `generate` as it is, under `torch.compile`, and compiled.

    python bench/gpu_decode.py --write                    keeps the table as bench/results/gpu-decode.md
    python bench/gpu_decode.py --device cpu --tiny        a toy on the CPU: shows that this file runs, and its figures mean little

A prompt of 128 tokens and 128 more, greedy; what the prompt and one token take is subtracted. The ways take turns; a row has the median of
its rounds, what the first generate took with all that was compiled in it, and what of the plain model's tokens are the same: bfloat16
rounds otherwise in other kernels, and of two tokens that are as likely either may come first. *of the floor*: beside reading all weights
once, at the rate of a copy on this GPU.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from gpu import SHAPE, TINY, waited
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

import meshc

PAGE = Path(__file__).parent / "results" / "gpu-decode.md"
PROMPT = 128
Generate = Callable[[torch.Tensor, int], torch.Tensor]


def model_of(shape: dict[str, int], device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, attn_implementation="sdpa"))
    return model.to(torch.bfloat16).eval().requires_grad_(False)


def generates(model: Any, **how: Any) -> Generate:
    """Tokens of exactly so many."""
    return lambda ids, new: model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **how)


def plain(shape: dict[str, int], device: str) -> Generate:
    return generates(model_of(shape, device))


def static(shape: dict[str, int], device: str) -> Generate:
    """As transformers compiles a decode by itself, with CUDA graphs."""
    how = transformers.CompileConfig(mode="reduce-overhead", fullgraph=False)
    how._compile_all_devices = True
    return generates(model_of(shape, device), cache_implementation="static", compile_config=how)


def compiled(shape: dict[str, int], device: str, backend: str, graph: bool) -> Generate:
    model = model_of(shape, device)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("tp",))
    program = meshc.compile(model, mesh, backend=backend, options=meshc.Options(debugging=meshc.Debugging(cuda_graph=graph)))
    return generates(program)


def seconds(generate: Generate, ids: torch.Tensor, new: int) -> float:
    waited(ids.device.type)
    start = time.perf_counter()
    generate(ids, new)
    waited(ids.device.type)
    return time.perf_counter() - start


def floor(shape: dict[str, int], device: str) -> float:
    """Seconds in which a copy on this device moves what a token reads."""
    read = sum(p.numel() * p.element_size() for name, p in model_of(shape, device).named_parameters() if "embed_tokens" not in name)
    block = torch.empty(1 << (31 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    other, took = torch.empty_like(block), []
    for _ in range(7):
        waited(device)
        start = time.perf_counter()
        other.copy_(block)
        waited(device)
        took.append(time.perf_counter() - start)
    return read / (2 * block.numel() / statistics.median(took))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--write", action="store_true", help="keep the table as bench/results/gpu-decode.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not run: this machine has no CUDA device", file=sys.stderr)
        return 0
    shape, device = TINY if options.tiny else SHAPE, options.device
    cuda = device == "cuda"
    transformers.logging.set_verbosity_error()
    dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1, store=dist.HashStore())
    least = floor(shape, device)
    ways: dict[str, Generate] = {"eager": plain(shape, device), "torch.compile, static cache, reduce-overhead": static(shape, device)}
    for backend in ("eager", "inductor"):
        for graph in (False, True) if cuda else (False,):
            ways[f"meshc, {backend}{', one CUDA graph' if graph else ''}"] = compiled(shape, device, backend, graph)
    rows: list[list[Any]] = []
    for count in options.rows:
        ids = torch.randint(3, shape["vocab_size"], (count, PROMPT), device=device)
        first: dict[str, float] = {}
        took: dict[str, list[float]] = {name: [] for name in ways}
        tokens: dict[str, torch.Tensor] = {}
        for name, generate in ways.items():
            start = time.perf_counter()
            tokens[name] = generate(ids, options.new)
            first[name] = time.perf_counter() - start
            print(name, f"{first[name]:.1f} s", file=sys.stderr, flush=True)
            generate(ids, options.new)
        for _ in range(options.rounds):
            for name, generate in ways.items():
                took[name].append((seconds(generate, ids, options.new) - seconds(generate, ids, 1)) / (options.new - 1))
        for name in ways:
            same = (tokens[name] == tokens["eager"])[:, PROMPT:].float().mean().item()
            base = [mine / theirs for mine, theirs in zip(took[name], took["eager"], strict=True)]
            ms = 1e3 * statistics.median(took[name])
            rows.append([count, name, ms, statistics.median(base), ms / (1e3 * least), first[name], same])
            print(*rows[-1], file=sys.stderr, flush=True)
        gc.collect()
    heads = ["rows", "way", "ms a token", "of eager", "of the floor", "first generate, s", "tokens as eager's"]
    table = tabulate(rows, heads, floatfmt=("", "", ".2f", ".3f", ".1f", ".1f", ".2f"), tablefmt="github" if options.write else "simple")
    print(table)
    if options.write:
        what = torch.cuda.get_device_name() if cuda else "a CPU"
        about = f"{what}, torch {torch.__version__}, transformers {transformers.__version__}, `{' '.join(['python', *sys.argv])}`"
        PAGE.write_text(f"# What a token takes on one GPU\n\n{about}. The floor: {1e3 * least:.2f} ms.\n\n{table}\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
