"""Holds the memory walk against the allocator: what a rank was predicted to hold, and what it held, of models and plans on two CPU ranks.

    python bench/peaks.py                 a table, 10 minutes; rows that are in bench/results/peaks.json are left out
    python bench/peaks.py --anew          those too
    python bench/peaks.py --write         and docs/memory-budgets.md carries what is there
    python bench/peaks.py --eager         without Inductor

The machine may do something else, but not so much that gloo's threads wait for a core: they let go of what they have sent a little after
it has been waited for.

*held* is the most bytes of tensors alive at once in a rank's fifth step, by torch's CPU allocator (`measure.py`); the batch is in
neither figure. *grown* is how much the process had grown since before the program was built, by what the kernel counts as
resident: freed memory that malloc keeps, code, and gloo's buffers are in it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
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
MODES = ("eager", "inductor")
KEPT = Path(__file__).parent / "results" / "peaks.json"
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
    return [model, plan, policy or "default", MODES[compiled], predicted / 2**20, held / 2**20, predicted / held, grown / 2**20]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=sorted({model for model, _, _ in PAIRS}))
    parser.add_argument("--plans", nargs="+", default=sorted({plan for _, plan, _ in PAIRS}))
    parser.add_argument("--eager", action="store_true", help="leave out Inductor")
    parser.add_argument("--anew", action="store_true", help="also rows that are there")
    parser.add_argument("--write", action="store_true", help="docs/memory-budgets.md carries all rows that are there")
    options = parser.parse_args()
    kept: dict[str, list[Any]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    cases = {" ".join((*pair[:2], pair[2] or "default", mode)): (pair, mode) for pair in PAIRS for mode in MODES}
    for name, ((model, plan, policy), mode) in cases.items():
        if model not in options.models or plan not in options.plans or (options.eager and mode != MODES[0]):
            continue
        if name not in kept or options.anew:
            kept[name] = row(model, plan, policy, mode != MODES[0])
            print(*kept[name], file=sys.stderr, flush=True)
            KEPT.write_text(json.dumps(kept, indent=1) + "\n")
    rows = [kept[name] for name in cases if name in kept]
    heads = ["model", "plan", "recomputed", "backend", "predicted MiB", "held MiB", "of it", "grown MiB"]
    digits = ("", "", "", "", ".1f", ".1f", ".3f", ".0f")
    print(tabulate(rows, headers=heads, floatfmt=digits))
    if options.write:
        carry("memory-budgets.md", "bench/peaks.py", tabulate(rows, headers=heads, floatfmt=digits, tablefmt="github"))
    return int(any(not LOW <= one[6] <= HIGH for one in rows))


if __name__ == "__main__":
    sys.exit(main())
