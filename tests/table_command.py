"""Commands that write a table of many cells: what all of them may be told, and how they go through their work."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from tests.proving import prove_all

Cell = TypeVar("Cell")
prove_all()


def command(module: str, doc: str | None, cells: str = "cells") -> argparse.ArgumentParser:
    """The options of all such commands; `doc` is the module's. What a cell is called goes into their help."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").splitlines()[0])
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help=f"start no more {cells} after so many seconds")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    return parser


def in_time(work: Sequence[Cell], limit_seconds: float, cells: str = "cells") -> Iterator[tuple[str, Cell]]:
    """Each cell with its place in the work (`[3/17]`), as long as there is time; then it is said how many are left."""
    begin = time.monotonic()
    for number, cell in enumerate(work, 1):
        if time.monotonic() - begin > limit_seconds:
            print(f"time is up: {len(work) - number + 1} {cells} left")
            return
        yield f"[{number}/{len(work)}]", cell
