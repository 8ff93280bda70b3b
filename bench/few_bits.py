"""Losses of one model in few bits: `examples/train_lm.py` on two CPU ranks in each format, from the same first values, on the same batches.

    python bench/few_bits.py                    300 steps of each; prints a table and the curves
    python bench/few_bits.py --steps 20         a look
    python bench/few_bits.py --write            and keeps them as bench/results/few-bits-two-cpu-ranks.md and .json

CPUs have no products of 8 bits: they are emulated, which is the definition, so losses are what they are on a GPU, and times are not. What a
rank sends and holds is counted from the program that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from drawn import Mark, panel
from report import machine
from tabulate import tabulate

import meshc
from meshc.cost import peak_memory
from meshc.report.summary import collectives

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import train_lm  # noqa: E402 - an example, beside the package

MESH = "dp_shard=2"
DATA = "dp_shard: batch; store params, grads, state\n"
CASES = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "float8 row": ("bfloat16", "precision *: float8 row"),
    "float8 block": ("bfloat16", "precision *: float8 block"),
    "nvfp4": ("bfloat16", "precision *: nvfp4"),
    "int8 messages": ("bfloat16", f"{DATA}compress dp_shard: int8"),
    "sign messages": ("bfloat16", f"{DATA}compress dp_shard: sign"),
    "2:4 weights": ("bfloat16", "sparse *: 2:4"),
}
"""Name -> (dtype, lines of the plan)."""
SIGNS = "fbrkni+s"
LAST = 20
"""Steps over whose losses the last column is the mean."""
KEPT = ROOT / "bench" / "results" / "few-bits-two-cpu-ranks"


def losses(dtype: str, plan: str, steps: int) -> list[dict[str, Any]]:
    """The rows of a run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_lm.py", "--out", folder,
            "--mesh", MESH, "--dtype", dtype, "--steps", str(steps), "--sample-every", "0", "--save-every", str(steps + 1),
        ]  # fmt: skip
        command += ["--plan", plan] if plan else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def traffic(dtype: str, plan: str) -> tuple[int, int]:
    """(bytes that a rank's collectives move in a step, bytes that it holds at most), of the program."""
    model = train_lm.build_model(128, 2, 128)
    optimizer, _ = train_lm.build_optimizer(model, 10, 1e-3)
    ids = torch.zeros(8, 128, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        step = meshc.TrainStep(model, optimizer=optimizer, clip_grad_norm=1.0)
        program = meshc.compile(step, meshc.Mesh(MESH), plan=plan or None, kwargs={"input_ids": ids, "labels": ids}).compiled
    return sum(use.times * use.bytes_per_rank for use in collectives(program)), peak_memory.peak_rank(program).total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--write", action="store_true", help="keep table and curves")
    asked = parser.parse_args()
    rows, marks, kept = [], [], {}
    for sign, (name, (dtype, plan)) in zip(SIGNS, CASES.items(), strict=False):
        found = [row["loss"] for row in losses(dtype, plan, asked.steps)]
        sent, held = traffic(dtype, plan)
        last = statistics.mean(found[-LAST:])
        rows.append((f"{sign}  {name}", f"{found[0]:.4f}", f"{last:.4f}", f"{sent / 2**20:.2f}", f"{held / 2**20:.2f}"))
        kept[name] = {"plan": plan, "dtype": dtype, "losses": [round(loss, 5) for loss in found], "sent_bytes": sent, "held_bytes": held}
        window = max(1, len(found) // 25)
        means = [(at, statistics.mean(found[max(0, at - window) : at + 1])) for at in range(window, len(found), window)]
        marks += [Mark(at, mean, sign) for at, mean in means]
        print(f"{name}: {last:.4f}", flush=True)
    heads = ["in", "first loss", f"mean of the last {LAST}", "sent MiB a step", "held MiB"]
    drawn = "\n".join(panel(marks, "loss, a sign for each row of the table", "steps", "loss", width=75, height=22))
    text = f"{tabulate(rows, heads, disable_numparse=True)}\n\n{drawn}\n"
    print(text)
    if asked.write:
        command, where = f"python bench/few_bits.py --steps {asked.steps} --write", ", ".join(map(str, machine().values()))
        about = f"# Losses in few bits\n\n`{command}`, mesh `{MESH}`, two gloo ranks; {where}.\n\n"
        KEPT.with_suffix(".md").write_text(f"{about}```text\n{text}```\n")
        KEPT.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
