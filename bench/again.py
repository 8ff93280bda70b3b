"""CPU seconds of compiling what was compiled before, in part or whole: further sizes of a program, and a second start of a job.

    python bench/again.py              # both tables
    python bench/again.py --write      # and docs/compile-time.md carries them

A training step with AdamW and clipping on the mesh dp=2,tp=2, weights on the meta device: GPT-2 as it is (12 layers) and with two, Llama
with two small layers and with 32 of 8B's widths. Sizes are lengths of sequences, one after another in one process. A start is a process of
its own, forked from one that has imported everything; the second finds what the first has left on disk (Options(cache=)).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's

import torch  # noqa: E402
import transformers  # noqa: E402
from carried import carry  # noqa: E402
from own_process import in_a_process  # noqa: E402
from tabulate import tabulate  # noqa: E402

import meshc  # noqa: E402

LENGTHS = (512, 640, 768, 832, 896, 960, 1024)
SMALL = {"hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8, "vocab_size": 32000}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
Make = Callable[[], transformers.PreTrainedModel]


def gpt2(layers: int) -> transformers.PreTrainedModel:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers))


def llama(layers: int, sizes: dict[str, int]) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, max_position_embeddings=2048, **sizes))


MODELS: dict[str, Make] = {
    "GPT-2, 2 layers": lambda: gpt2(2),
    "Llama, 2 layers": lambda: llama(2, SMALL),
    "GPT-2, 12 layers": lambda: gpt2(12),
    "Llama, 32 layers": lambda: llama(32, LARGE),
}


def step_of(make: Make) -> meshc.TrainStep:
    with torch.device("meta"):
        model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    return meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0)


def tokens(length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(16, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def sizes(make: Make) -> list[float]:
    """CPU seconds of each length, one after another."""
    step, found = step_of(make), []
    program: meshc.Program | None = None
    for length in LENGTHS:
        start = time.process_time()
        if program is None:
            program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=tokens(length))
        else:
            program.prepare((), tokens(length))
        found.append(time.process_time() - start)
    return found


def start_of(make: Make, folder: Path) -> tuple[float, bool]:
    """CPU seconds of a start, and whether it has found its program."""
    step, begun = step_of(make), time.process_time()
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=tokens(LENGTHS[0]), options=meshc.Options(cache=folder))
    return time.process_time() - begun, "taken from disk" in program.timings


def table_of_sizes() -> str:
    rows = []
    for name, make in MODELS.items():
        seconds: list[float] = in_a_process(sizes, make)
        ratio = median(seconds[3:]) / seconds[0]
        rows.append([name, *(f"{value:.2f}" for value in seconds), f"{ratio:.2f}"])
        print(*rows[-1], flush=True)
    heads = ("model", *(f"{length} tokens" for length in LENGTHS), "median from 832 on, of the first")
    return tabulate(rows, heads, tablefmt="github", disable_numparse=True)


def table_of_starts() -> str:
    rows = []
    for name, make in MODELS.items():
        folder = Path(tempfile.mkdtemp())
        try:
            (first, was_there), (second, is_there) = in_a_process(start_of, make, folder), in_a_process(start_of, make, folder)
        finally:
            shutil.rmtree(folder)
        assert not was_there and is_there
        rows.append([name, f"{first:.2f}", f"{second:.2f}", f"{second / first:.2f}"])
        print(*rows[-1], flush=True)
    return tabulate(rows, ("model", "first start", "second start", "of the first"), tablefmt="github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401  # these with the imports, not with every cell
    from transformers.models.llama import modeling_llama  # noqa: F401

    from meshc.private import aot_export_joint_with_descriptors, graph_capture  # noqa: F401

    imports = time.process_time()
    found = f"CPU seconds; imports beside that: {imports:.1f} s.\n\n{table_of_sizes()}\n\n{table_of_starts()}"
    print(found)
    if asked.write:
        carry("compile-time.md", "bench/again.py", found)


if __name__ == "__main__":
    main()
