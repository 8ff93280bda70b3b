"""Write tests/zoo/operators.txt: every operator of the graphs that the zoo's models are captured to, for inference and for training.

    python -m tests.zoo.operators

These are the graphs that the rules see first: after AOTAutograd, before the optimizer's update. Models that cannot be traced are named on
stderr, and have no part in the list.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path

from meshc.text.allowed import spelling
from tests.captured import Captured
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
    warnings.simplefilter("ignore")
    found: set[str] = set()
    for name in NAMES:
        for train in (False, True):
            try:
                found |= operators(name, train)
            except Exception as error:
                print(f"{name}, {'training' if train else 'inference'}: {first_line(f'{type(error).__name__}: {error}')}", file=sys.stderr)
            gc.collect()
    LIST.write_text("".join(f"{operator}\n" for operator in sorted(found)))
    print(f"{len(found)} operators in {len(NAMES)} families")
    return 0


if __name__ == "__main__":
    sys.exit(main())
