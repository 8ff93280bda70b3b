"""A training step of a Llama of 1.2 billion parameters on one GPU: milliseconds and memory, under each policy of what backward recomputes.

    make bench-gpu                               on a machine with a CUDA device; elsewhere it says that it was not run
    python bench/gpu.py --write                  keeps the table as bench/results/gpu.md
    python bench/gpu.py --device cpu --tiny      a toy on the CPU: shows that this file runs, and its figures mean little

Beside meshc stand the plain model and `torch.compile`, with and without `torch.utils.checkpoint` around each layer. bfloat16, fused AdamW.
Steps are interleaved; *of eager* is the median of the ratios to the eager model's neighbouring step. *peak* is what the caching allocator
had handed out at most during a step (`torch.cuda.max_memory_allocated`; of a CUDA graph, while it was recorded), *predicted* what the
program's walk says.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.cost import peak_memory
from meshc.plan.memory_lines import POLICIES

SHAPE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512,
}  # fmt: skip
PAGE = Path(__file__).parent / "results" / "gpu.md"


@dataclass
class Contender:
    """One way to take a step. `held` and `predicted` in bytes; None where nothing says."""

    step: Callable[[], object]
    predicted: int | None = None
    held: int | None = None
    step_s: list[float] = field(default_factory=list)


def said_plain(mode: str | None, checkpoint: bool) -> str:
    return f"{'eager' if mode is None else f'torch.compile, {mode}'}{', checkpoint' if checkpoint else ''}"


def said_compiled(backend: str, policy: str, graph: bool) -> str:
    return f"meshc, {backend}{', one CUDA graph' if graph else ''}, {policy}"


def model_of(shape: dict[str, int], device: str, checkpoint: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False, attn_implementation="sdpa")).to(torch.bfloat16)
    if checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def plain(shape: dict[str, int], ids: torch.Tensor, mode: str | None, checkpoint: bool) -> Contender:
    model = model_of(shape, ids.device.type, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    forward = model if mode is None else torch.compile(model, mode=mode)

    def step() -> object:
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return None

    return Contender(step)


def compiled(shape: dict[str, int], ids: torch.Tensor, backend: str, policy: str, graph: bool) -> Contender:
    model = model_of(shape, ids.device.type)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    mesh = init_device_mesh(ids.device.type, (1,), mesh_dim_names=("dp",))
    options = meshc.Options(remat=policy, debugging=meshc.Debugging(cuda_graph=graph))
    program = meshc.compile(step, mesh, kwargs={"input_ids": ids, "labels": ids}, backend=backend, options=options)
    return Contender(lambda: program(input_ids=ids, labels=ids), peak_memory.peak_rank(program.compiled).total)


def waited(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measured(one: Contender, device: str) -> None:
    """Five steps, of which the last two are looked at for memory: a CUDA graph is recorded in the fourth."""
    for number in range(5):
        waited(device)
        if device == "cuda" and number == 3:
            torch.cuda.reset_peak_memory_stats()
        one.step()
        waited(device)
    if device == "cuda":
        one.held = torch.cuda.max_memory_allocated()


def timed(one: Contender, device: str) -> None:
    waited(device)
    start = time.perf_counter()
    one.step()
    waited(device)
    one.step_s.append(time.perf_counter() - start)


def table(rows: list[list[object]], how: str) -> str:
    heads = ["step", "ms", "of eager", "peak GiB", "predicted GiB", "five first steps, s"]
    return tabulate(rows, headers=heads, floatfmt=("", ".1f", ".3f", ".2f", ".2f", ".1f"), tablefmt=how)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy shape")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--only", default="", help="a regular expression: rows whose title has it")
    parser.add_argument("--write", action="store_true", help="keep the table as bench/results/gpu.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("not run: this machine has no CUDA device", file=sys.stderr)
        return 0
    shape, length = (TINY, 64) if options.tiny else (SHAPE, options.length)
    ids = torch.randint(shape["vocab_size"], (options.batch, length), device=options.device)
    cuda = options.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", rank=0, world_size=1, store=dist.HashStore())
    modes = (None, "default", "max-autotune") if cuda else (None,)
    backends = [("eager", False), ("eager", True), ("inductor", False), ("inductor", True)] if cuda else [("eager", False)]
    makers = {
        **{said_plain(mode, again): partial(plain, shape, ids, mode, again) for again in (False, True) for mode in modes},
        **{
            said_compiled(backend, policy, graph): partial(compiled, shape, ids, backend, policy, graph)
            for policy in POLICIES for backend, graph in backends
        },
    }  # fmt: skip
    rows: list[list[object]] = []
    rising = sorted(makers.items(), key=lambda row: "autotune" in row[0])  # which takes minutes to compile
    for title, make in rising:  # each lives alone with an eager model; what is held was looked at before that was made
        if not re.search(options.only, title):
            continue
        begun = time.perf_counter()
        one = make()
        measured(one, options.device)
        begun = time.perf_counter() - begun
        base = plain(shape, ids, None, False)
        base.step()
        for number in range(options.rounds):
            for each in (one, base) if number % 2 else (base, one):
                timed(each, options.device)
        ratios = [mine / theirs for mine, theirs in zip(one.step_s, base.step_s, strict=True)]
        figures = [None if some is None else some / 2**30 for some in (one.held, one.predicted)]
        rows.append([title, 1e3 * statistics.median(one.step_s), statistics.median(ratios), *figures, begun])
        print(*rows[-1], file=sys.stderr, flush=True)
        if options.write:  # after each row, so that a run that ends early leaves those that it had
            about = f"{torch.cuda.get_device_name() if cuda else 'a CPU'}, torch {torch.__version__}, `{' '.join(['python', *sys.argv])}`"
            PAGE.write_text(f"# A training step on one GPU\n\n{about}\n\n{table(rows, 'github')}\n")
        del one, base, each
        gc.collect()
    print(table(rows, "simple"))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
