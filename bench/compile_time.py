"""CPU seconds and memory of compiling a training step of Llama, by layers, ranks and phase, and of Gemma2; no process group, no Inductor.

    python bench/compile_time.py                            # the table
    python bench/compile_time.py --layers 2 32 --ranks 64   # some of it
    python bench/compile_time.py --write                    # and docs/compile-time.md carries it

Each cell is a process of its own, forked from one that has imported everything: it pays for what a first compilation sets up, and what
the imports take is said once. Weights are on the meta device; 80 layers have the 70B shape, fewer the 8B's. The plan is the axes' own;
with `pp` there are two stages and four microbatches. Gemma2 has the widths of 27B and 32 layers, of which every second is local.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
import transformers  # noqa: E402
from carried import carry  # noqa: E402
from own_process import in_a_process  # noqa: E402
from tabulate import tabulate  # noqa: E402

import meshc  # noqa: E402

LAYERS, RANKS, TOKENS = (2, 8, 32, 80), (8, 64, 512, 4096), 8192
SMALL: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
}  # fmt: skip
IN_TURN = 32
"""Layers of Gemma2."""
LARGE = SMALL | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
PHASES = ("capture", "differentiate", "partition", "grow", "memory")


def mesh_of(ranks: int, stages: int) -> str:
    tensor = min(8, ranks // stages)  # a node has eight
    sizes = {"pp": stages, "dp_shard": ranks // stages // tensor, "tp": tensor}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)


def llama(layers: int) -> transformers.PreTrainedModel:
    sizes = LARGE if layers >= 80 else SMALL
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=TOKENS, **sizes))


def gemma2(layers: int) -> transformers.PreTrainedModel:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(num_hidden_layers=layers, max_position_embeddings=TOKENS, **GEMMA2))


def compile_once(make: Callable[[int], transformers.PreTrainedModel], layers: int, ranks: int, stages: int) -> dict[str, float]:
    """CPU seconds by phase and of all, and the process's peak of memory in GB."""
    with torch.device("meta"):
        model = make(layers).train()
        ids = torch.zeros(max(64, ranks // 8), TOKENS, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    step = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0, microbatches=4 if stages > 1 else None)
    start = time.process_time()
    program = meshc.compile(step, meshc.Mesh(mesh_of(ranks, stages)), kwargs={"input_ids": ids, "labels": ids})
    found = {"all": time.process_time() - start, "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}
    return found | dict(program.lowered.seconds)


def table(layers: list[int], ranks: list[int]) -> str:
    imports, resident = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows: list[list[object]] = []
    cells = [(llama, count, size, stages) for stages in (1, 2) for count in layers for size in ranks]
    cells += [(gemma2, IN_TURN, size, 1) for size in ranks]
    for make, count, size, stages in cells:
        found = in_a_process(compile_once, make, count, size, stages)
        rest = found["all"] - sum(found.get(phase, 0.0) for phase in PHASES)
        seconds = [f"{value:.1f}" for value in (*(found.get(phase, 0.0) for phase in PHASES), rest, found["all"])]
        said = f"{count} of Gemma2" if make is gemma2 else str(count)
        rows.append([said, size, mesh_of(size, stages), *seconds, f"{found['GB']:.2f}"])
        print(*rows[-1], flush=True)
    heads = ("layers", "ranks", "mesh", *PHASES, "other", "all", "GB")
    beside = f"imports beside that: {imports:.1f} s, and {resident:.2f} GB of the peak"
    shown = tabulate(rows, heads, tablefmt="github", disable_numparse=True)
    return f"CPU seconds by phase, and the process's peak of memory; {beside}.\n\n{shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    from transformers.models.gemma2 import modeling_gemma2  # noqa: F401  # these with the imports, not with every cell
    from transformers.models.llama import modeling_llama  # noqa: F401

    from meshc.private import aot_export_joint_with_descriptors, graph_capture  # noqa: F401

    found = table(asked.layers, asked.ranks)
    print(found)
    if asked.write:
        carry("compile-time.md", "bench/compile_time.py", found)


if __name__ == "__main__":
    main()
