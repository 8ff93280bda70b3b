"""From starting torchrun to the first loss: the demo's model under meshc, and under FSDP2 as people write it.

    python bench/first_loss.py                # the table
    python bench/first_loss.py --write        # and docs/compile-time.md carries it

`examples/train_llama.py`'s Llama (4 layers of 256), 8 x 128 tokens, AdamW with clipping, on gloo ranks of this machine: meshc on the
demo's mesh and on FSDP2's, cold, and once more with programs on disk; FSDP2 (`fully_shard` on each layer and on the whole) over all ranks.
`wall` is seconds from the start of torchrun to when rank 0 has the loss on the host; `CPU` those of all ranks together, and of them
`imports` up to the process group, `second` a second step. Ranks share this machine's cores. meshc's bytecode is there before, as pip
leaves it where it is installed.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

CLIP = 1.0
SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
"""The demo's."""
WAYS = {
    "FSDP2": "fsdp2",
    "meshc, dp_shard": "dp_shard",
    "meshc, dp,tp": "dp,tp",
    "meshc, dp,tp, from disk": "dp,tp",
}
"""In the order in which they run: the last finds what the one before has left."""


def rank(way: str, folder: str) -> None:
    """One rank of a way: writes what it took."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    if way != "fsdp2":
        import meshc
    names = ("dp", "tp") if way == "dp,tp" else ("dp_shard",)
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (2, world // 2) if len(names) == 2 else (world,), mesh_dim_names=names)
    imports_s = time.process_time()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    ids = torch.randint(SIZES["vocab_size"], (8, 128))
    if way == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    if way == "fsdp2":
        mine = ids.chunk(world)[dist.get_rank()]

        def step() -> float:
            loss = model(input_ids=mine, labels=mine).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(whole := loss.detach() / world)
            return whole.item()

    else:
        train = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=CLIP)
        program = meshc.compile(train, mesh, options=meshc.Options(cache=Path(folder)))

        def step() -> float:
            return float(program(input_ids=ids, labels=ids).item())

    loss = step()
    found = {"wall": time.time() - float(os.environ["STARTED"]), "CPU": time.process_time(), "imports": imports_s, "loss": loss}
    at = time.perf_counter()
    step()
    (Path(folder) / f"rank{dist.get_rank()}.json").write_text(json.dumps(found | {"second": time.perf_counter() - at}))
    dist.barrier()
    dist.destroy_process_group()


def run(way: str, ranks: int, folder: str) -> dict[str, float]:
    """Rank 0's wall seconds, and CPU seconds of all ranks."""
    for old in Path(folder).glob("rank*.json"):
        old.unlink()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    environment = os.environ | {"STARTED": str(time.time())}
    subprocess.run([*launch, "--way", way, "--folder", folder], env=environment, check=True, timeout=280)
    rows = [json.loads((Path(folder) / f"rank{number}.json").read_text()) for number in range(ranks)]
    shared = {name: sum(row[name] for row in rows) for name in ("CPU", "imports")}
    return {name: rows[0][name] for name in ("wall", "second", "loss")} | shared


def written() -> None:
    """Bytecode of meshc's files, where a checkout has none yet."""
    root = Path(__file__).parents[1]
    for name in ("meshc", "passes", "runtime"):
        compileall.compile_dir(root / name, quiet=1)


def table(ranks: int) -> str:
    from tabulate import tabulate

    written()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for said, way in WAYS.items():
            found = run(way, ranks, folder)
            seconds = [f"{found[name]:.1f}" for name in ("wall", "CPU", "imports")]
            rows.append([said, *seconds, f"{found['second']:.2f}", f"{found['loss']:.4f}"])
            print(*rows[-1], flush=True)
    heads = ("", "wall", "CPU of all ranks", "imports, of that", "second step", "first loss")
    return f"Seconds, {ranks} ranks on {os.cpu_count()} cores.\n\n{tabulate(rows, heads, tablefmt='github', disable_numparse=True)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.way is not None:
        rank(asked.way, asked.folder)
        return
    found = table(asked.ranks)
    print(found)
    if asked.write:
        from carried import carry

        carry("compile-time.md", "bench/first_loss.py", found)


if __name__ == "__main__":
    main()
