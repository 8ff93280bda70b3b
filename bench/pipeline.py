"""Pipelines of two CPU ranks: meshc and torch.distributed.pipelining on the nanoGPT-like decoder, in one table.

    python bench/pipeline.py                         GPipe and 1F1B, 4 and 8 microbatches, eager and compiled stages; kept plan by plan
    python bench/pipeline.py --anew                  also plans that are there
    python bench/pipeline.py --eager --pairs 5       a look

What is measured, and how, is `run.py`'s; `bench/README.md` says how to read it.
"""

from __future__ import annotations

import argparse
import sys

from kept import run
from run import measure

MODEL = "nanogpt, batch 8"
PLANS = ("gpipe-4", "gpipe-8", "1f1b-4", "1f1b-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--pairs", type=int, default=15, help="interleaved timed steps of each contender")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile and Inductor")
    parser.add_argument("--anew", action="store_true", help="also plans that are there")
    parser.add_argument("--name", help="of the files in bench/results/; by default pipeline-two-cpu-ranks, but for --eager")
    parser.add_argument("--verbose", action="store_true", help="print what the ranks print")
    options = parser.parse_args()
    options.systems, options.default_adamw, options.remat = ["peer", "meshc"], False, []
    name = options.name or (None if options.eager else "pipeline-two-cpu-ranks")
    cases, chosen = ([(MODEL, plan) for plan in plans] for plans in (PLANS, options.plans))
    command = "python bench/pipeline.py"
    return run(cases, chosen, lambda _, plan: measure("nanogpt8", plan, options), options.pairs, name, command, options.anew)


if __name__ == "__main__":
    sys.exit(main())
