"""CPU seconds of the first step of a program compiled by Inductor: cold, and in a second process that finds on disk what one has made.

    python bench/first_step.py                   # a Llama of 2, 8 and 32 layers
    python bench/first_step.py --layers 2 32     # some of it
    python bench/first_step.py --write           # and docs/compile-time.md carries it

Hidden 128, 4 x 64 tokens, AdamW, one rank. Each cell is a process of its own, forked from one that has imported everything, with
`TORCHINDUCTOR_CACHE_DIR` an empty folder for the first of two and the same folder for the second; seconds are the process's and its
compilers'. `compile` is meshc's, up to the first step; `step` is a later step.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: CPU seconds of idle threads are no one's
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose children are counted

import torch  # noqa: E402
import torch._inductor.compile_fx  # noqa: E402  # with the imports, not with every cell
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from carried import carry  # noqa: E402
from own_process import in_a_process  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import meshc  # noqa: E402

LAYERS = (2, 8, 32)
VOCAB = 256
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def seconds() -> float:
    """CPU seconds of this process and of those of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def start(layers: int, folder: str) -> list[float]:
    """CPU seconds of compiling, of the first step, and of a later one."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, **SIZES)).train()
    ids = torch.randint(VOCAB, (4, 64))
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
    at = [seconds()]
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    program = meshc.compile(step, mesh, kwargs={"input_ids": ids, "labels": ids}, backend="inductor")
    at.append(seconds())
    for _ in range(2):
        program(input_ids=ids, labels=ids)
        at.append(seconds())
    dist.destroy_process_group()
    return [after - before for before, after in zip(at, at[1:], strict=False)]


def table(layers: list[int]) -> str:
    rows: list[list[object]] = []
    for count in layers:
        with tempfile.TemporaryDirectory() as folder:
            cold, again = (in_a_process(start, count, folder) for _ in range(2))
        rows.append([count, f"{cold[0]:.1f}", f"{cold[1]:.1f}", f"{again[1]:.1f}", f"{min(cold[2], again[2]):.2f}"])
        print(*rows[-1], flush=True)
    heads = ("layers", "compile", "first step, cold", "first step of a second process", "step")
    return f"CPU seconds.\n\n{tabulate(rows, heads, tablefmt='github', disable_numparse=True)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    found = table(asked.layers)
    print(found)
    if asked.write:
        carry("compile-time.md", "bench/first_step.py", found)


if __name__ == "__main__":
    main()
