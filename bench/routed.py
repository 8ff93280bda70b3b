"""Sequences over `cp` and experts over `ep`, beside what is written by hand with torch.distributed: one table.

    python bench/routed.py                    a long sequence (ring, gathered keys), and Mixtral (all-to-all, experts split inside)
    python bench/routed.py --ranks 4          on four ranks, kept as routed-four-cpu-ranks
    python bench/routed.py --anew             also what is there
    python bench/routed.py --plans cp --pairs 5 --eager

What is measured, and how, is `run.py`'s; `bench/README.md` says how to read it. *of peer* is of the faster one by hand.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from kept import run
from run import launched

CASES = {"cp": "long", "ep": "mixtral"}
BY_HAND = {"cp": ("ring", "gather"), "ep": ("all-to-all",)}
OTHERWISE = {"cp": ("cp: seq", "cp: heads@attention > seq"), "ep": ("ep: ffn, heads",)}
"""Other plans of meshc, for comparison."""
NAMES = {2: "two", 4: "four"}


def otherwise(plan: str, ranks: int) -> tuple[str, ...]:
    """`long` has six heads: over four ranks they go with a ring of two, as they do by the name of the axis."""
    return tuple(way.replace("heads@", "heads*seq@") if ranks > 2 else way for way in OTHERWISE[plan])


def contenders(plan: str, ranks: int, compiled: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"system": "single"}]
    for mode in (False, True) if compiled else (False,):
        rows += [{"system": "peer", "compiled": mode, "way": way} for way in BY_HAND[plan] if not mode or plan == "cp"]
        rows += [{"system": "meshc", "compiled": mode}]
    return rows + [{"system": "meshc", "way": way} for way in otherwise(plan, ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--ranks", type=int, choices=list(NAMES), default=2)
    parser.add_argument("--pairs", type=int, default=15, help="interleaved timed steps of each contender")
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile and Inductor")
    parser.add_argument("--anew", action="store_true", help="also what is there")
    parser.add_argument("--name", help="of the files in bench/results/; by default routed-two-cpu-ranks or -four-, but for --eager")
    options = parser.parse_args()
    name = options.name or (None if options.eager else f"routed-{NAMES[options.ranks]}-cpu-ranks")
    cases, chosen = ([(CASES[plan], plan) for plan in plans] for plans in (CASES, options.plans))

    command = "python bench/routed.py" + (f" --ranks {options.ranks}" if options.ranks != 2 else "")

    def measure(model: str, plan: str) -> list[dict[str, Any]]:
        return launched(model, plan, contenders(plan, options.ranks, not options.eager), options.pairs, ranks=options.ranks)

    return run(cases, chosen, measure, options.pairs, name, command, options.anew)


if __name__ == "__main__":
    sys.exit(main())
