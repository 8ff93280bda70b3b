"""Write tests/zoo/operators.txt: every operator of the graphs that the zoo's models are captured to, for inference and for training.

    python -m tests.zoo.operators [--limit-seconds T] [--fresh]

These are the graphs that the rules see first: after AOTAutograd, before the optimizer's update. What each graph holds is kept in
out/operators.json, so a run that was stopped goes on where it was; the list is written when all are there. Models that cannot be traced
are named, and have no part in it.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

from meshc.text.allowed_operators import spelling
from tests.captured import Captured
from tests.results import Results
from tests.table_command import command, in_time
from tests.zoo.run import NAMES, case, first_line

LIST = Path(__file__).resolve().parent / "operators.txt"


def operators(name: str, train: bool) -> set[str]:
    """Operators of one family's graph, as programs spell them."""
    graph = Captured(case(name), train=train, double=True).traced.operators().graph
    return {spelling(node.target) for node in graph.nodes if node.op == "call_function"} - {"getitem", "_operator.getitem"}


def used() -> set[str]:
    """The list as it was last written."""
    return set(LIST.read_text().split())


def main() -> int:
    arguments = command("tests.zoo.operators", __doc__, "graphs").parse_args()
    warnings.simplefilter("ignore")
    results = Results("operators", arguments.fresh)
    graphs = {f"{name}, {'training' if train else 'inference'}": (name, train) for name in NAMES for train in (False, True)}
    for place, key in in_time([key for key in graphs if key not in results.rows], arguments.limit_seconds, "graphs"):
        try:
            results.rows[key] = sorted(operators(*graphs[key]))
            print(f"{place} {key}: {len(results.rows[key])} operators", flush=True)
        except Exception as error:
            results.rows[key] = []
            print(f"{place} {key}: {first_line(f'{type(error).__name__}: {error}')}", flush=True)
        results.keep()
        gc.collect()
    if missing := set(graphs) - set(results.rows):
        print(f"{LIST.name} is as it was: {len(missing)} graphs are missing")
        return 0
    found = {operator for key in graphs for operator in results.rows[key]}
    LIST.write_text("".join(f"{operator}\n" for operator in sorted(found)))
    print(f"{len(found)} operators in {len(NAMES)} families")
    return 0


if __name__ == "__main__":
    sys.exit(main())
