"""What a token takes: generate of a plain Llama, of one under torch.compile (static cache), and of one compiled for 1 and 2 CPU ranks.

    python bench/generate.py                 # the table, and bench/results/generate-cpu-ranks.md
    python bench/generate.py --ranks 1 --rounds 3 --rows 1 --no-compile

Each number of ranks is one launch, in which the ways take turns: a prompt of 100 tokens and 64 more, greedy, float32, one thread a rank;
what the prompt takes is subtracted. The plain ones run on rank 0 while the others wait. A row has the median of its rounds, what the first
generate took with all that was compiled in it, and how many programs that were. Tokens must be the plain model's.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import meshc  # noqa: E402

KEPT = Path(__file__).parent / "results" / "generate-cpu-ranks.md"
PROMPT, NEW = 100, 64
SIZES: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
    max_position_embeddings=1024,
)  # fmt: skip
HEAD = ("rows", "way", "ms a token", "first generate, s", "programs")
Generate = Callable[[torch.Tensor, int], torch.Tensor]


def generates(model: Any, **kwargs: Any) -> Generate:
    """Tokens of exactly so many."""
    return lambda ids, new: model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **kwargs)


def compiled_by_torch(model: Any) -> Generate:
    how = transformers.CompileConfig(fullgraph=False, mode="default")
    how._compile_all_devices = True  # generate compiles on GPUs alone, unless it is told
    return generates(model, cache_implementation="static", compile_config=how)


def seconds(generate: Generate, ids: torch.Tensor, new: int) -> float:
    start = time.perf_counter()
    generate(ids, new)
    return time.perf_counter() - start


def measure(rows: int, rounds: int, by_torch: bool) -> list[tuple[Any, ...]]:
    """A launch's table for one number of rows, on rank 0."""
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval().requires_grad_(False)
    ids = torch.randint(3, 8192, (rows, PROMPT))
    twin = copy.deepcopy(model)
    program = meshc.compile(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
    ways: dict[str, Generate] = {"plain": generates(twin)}
    if by_torch:
        ways["torch.compile"] = compiled_by_torch(copy.deepcopy(twin))
    ways[f"meshc, {ranks} rank{'s' * (ranks > 1)}"] = generates(program)
    begun, took, wanted = {}, {name: [] for name in ways}, twin.generate(ids, max_new_tokens=NEW, do_sample=False)
    for turn in range(rounds + 1):
        for name, generate in ways.items():
            dist.barrier()
            if not first and not name.startswith("meshc"):
                continue
            if turn == 0:
                begun[name] = seconds(generate, ids, NEW)
                assert not name.startswith("meshc") or torch.equal(program.generate(ids, max_new_tokens=NEW, do_sample=False), wanted)
            else:
                took[name].append((seconds(generate, ids, NEW) - seconds(generate, ids, 1)) / (NEW - 1))
    if not first:
        return []
    count = len(program.compilations.kept)
    return [
        (rows, name, f"{1e3 * statistics.median(took[name]):.1f}", f"{begun[name]:.1f}", count if name.startswith("meshc") else "")
        for name in ways
    ]


def work(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    transformers.logging.set_verbosity_error()
    table = [row for rows in options.rows for row in measure(rows, options.rounds, options.by_torch)]
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(table))
    dist.barrier()
    dist.destroy_process_group()


def launch(ranks: int, options: argparse.Namespace) -> list[list[Any]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        command += ["--out", file.name, "--rounds", str(options.rounds), "--rows", *map(str, options.rows)]
        command += ["--no-compile"] * (not options.by_torch)
        subprocess.run(command, check=True)
        found: list[list[Any]] = json.loads(Path(file.name).read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-compile", dest="by_torch", action="store_false", help="leave out torch.compile")
    parser.add_argument("--out", help="of a rank: where its table goes")
    options = parser.parse_args()
    if options.out:
        work(options)
        return
    tables = [f"Launch of {n} rank{'s' * (n > 1)}:\n\n{tabulate(launch(n, options), HEAD, 'github')}" for n in options.ranks]
    text = "\n\n".join(tables)
    print(text)
    command = " ".join(["python bench/generate.py", *sys.argv[1:]])
    said = f"`{command}`: torch {torch.__version__}, transformers {transformers.__version__}, {os.cpu_count()} cores"
    KEPT.write_text(f"# What a token takes\n\n{said} ({platform.machine()}), one thread a rank.\n\n{text}\n")


if __name__ == "__main__":
    main()
