"""Pipelines of two CPU ranks: meshc and torch.distributed.pipelining on the nanoGPT-like decoder, in one table.

    python bench/pipeline.py                         GPipe and 1F1B, 4 and 8 microbatches, eager and compiled stages
    python bench/pipeline.py --eager --pairs 5       a look

What is measured, and how, is `run.py`'s; `bench/README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from report import machine, table, write
from run import HERE, measure

PLANS = ("gpipe-4", "gpipe-8", "1f1b-4", "1f1b-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--pairs", type=int, default=15, help="interleaved timed steps of each contender")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile and Inductor")
    parser.add_argument("--name", help="of the files in bench/results/; by default only a run of everything writes them")
    parser.add_argument("--verbose", action="store_true", help="print what the ranks print")
    options = parser.parse_args()
    options.systems, options.default_adamw, options.remat = ["peer", "meshc"], False, []
    name = options.name or ("pipeline-two-cpu-ranks" if not options.eager and options.plans == list(PLANS) else None)
    start = time.monotonic()
    results = []
    for plan in options.plans:
        print(f"measuring {plan} ...", file=sys.stderr, flush=True)
        results.append({"model": "nanogpt, batch 8", "plan": plan, "rows": measure("nanogpt8", plan, options)})
    print(table(results))
    about = {"command": " ".join(["python", "bench/pipeline.py", *sys.argv[1:]]), "machine": machine(), "pairs": options.pairs}
    about["minutes"] = round((time.monotonic() - start) / 60, 1)
    beyond = write(results, about, HERE / "results" / name if name else None)
    return int(beyond or any(holds_more(result["rows"]) for result in results))


def holds_more(rows: list[dict[str, Any]]) -> bool:
    """Whether a meshc row has a higher peak of memory than the peer of its mode."""
    peaks = {(row["system"], row["mode"]): row["peak_bytes_per_rank"] for row in rows if row["peak_bytes_per_rank"] is not None}
    more = [mode for (system, mode), peak in peaks.items() if system == "meshc" and peak > peaks.get(("peer", mode), peak)]
    for mode in more:
        print(f"meshc, {mode}: holds more than torch.distributed.pipelining", file=sys.stderr)
    return bool(more)


if __name__ == "__main__":
    sys.exit(main())
