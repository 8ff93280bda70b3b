"""Holds the memory walk against the allocator: what a rank was predicted to hold, and what it held, of models and plans on two CPU ranks.

    python bench/peaks.py                 a table, 10 minutes; the machine may do something else
    python bench/peaks.py --write         and into docs/memory.md
    python bench/peaks.py --eager         without Inductor

*held* is the most bytes of tensors alive at once in a rank's fifth step, by torch's CPU allocator (`measure.py`); the batch is in
neither figure. *grown* is how much the process had grown since before the program was built, by what the kernel counts as
resident: freed memory that malloc keeps, code, and gloo's buffers are in it.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from carried import carry
from run import launch
from tabulate import tabulate

PAIRS = [
    ("llama", "ddp", None), ("llama", "fsdp", None), ("llama", "megatron", None), ("llama", "megatron_sp", None),
    ("llama", "fsdp", "selective"), ("llama", "megatron_sp", "layer"),
    ("nanogpt", "ddp", None), ("nanogpt", "fsdp", None), ("nanogpt", "megatron", None), ("nanogpt", "fsdp", "layer"),
    ("mlp", "ddp", None), ("mlp", "fsdp", None), ("mlp", "megatron", None),
    ("nanogpt8", "gpipe-4", None), ("nanogpt8", "1f1b-4", None),
]  # fmt: skip
LOW, HIGH = 0.95, 1.10
"""Predicted over held."""


def row(model: str, plan: str, policy: str | None, compiled: bool) -> list[Any]:
    """One line of the table. Raises RuntimeError where the ranks ended, with what they printed."""
    contenders: list[dict[str, Any]] = [{"system": "single"}, {"system": "meshc", "compiled": compiled}]
    if policy is not None:
        contenders[1]["remat"] = policy
    rows, log, status = launch({"model": model, "plan": plan, "pairs": 0, "contenders": contenders})
    if status != 0 or rows[-1]["problem"]:
        raise RuntimeError(f"{model}, {plan}: {rows[-1]['problem'] if rows else 'the ranks ended'}\n{log}")
    predicted, held, grown = (rows[-1][f"{figure}_bytes_per_rank"] for figure in ("predicted", "peak", "grown"))
    mode = "inductor" if compiled else "eager"
    return [model, plan, policy or "default", mode, predicted / 2**20, held / 2**20, predicted / held, grown / 2**20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=sorted({model for model, _, _ in PAIRS}))
    parser.add_argument("--eager", action="store_true", help="leave out Inductor")
    parser.add_argument("--write", action="store_true", help="write the table into docs/memory.md")
    options = parser.parse_args()
    rows: list[list[Any]] = []
    for model, plan, policy in PAIRS:
        for compiled in (False,) if options.eager else (False, True):
            if model in options.models:
                rows.append(row(model, plan, policy, compiled))
                print(*rows[-1], file=sys.stderr, flush=True)
    heads = ["model", "plan", "made again", "backend", "predicted MiB", "held MiB", "of it", "grown MiB"]
    digits = ("", "", "", "", ".1f", ".1f", ".3f", ".0f")
    print(tabulate(rows, headers=heads, floatfmt=digits))
    if options.write:
        carry("memory.md", "bench/peaks.py", tabulate(rows, headers=heads, floatfmt=digits, tablefmt="github"))
    return int(any(not LOW <= one[6] <= HIGH for one in rows))


if __name__ == "__main__":
    sys.exit(main())
