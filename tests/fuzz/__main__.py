"""`python -m tests.fuzz`: random programs on random meshes under random plans, until a number of cases has run."""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.formats import SCALED
from tests.fuzz.case import PLAIN, Case, How
from tests.fuzz.check import Captured, Outcome, captured, check_once
from tests.fuzz.plans import draw_how, draw_mesh, draw_parts, draw_plan
from tests.fuzz.programs import draw_program
from tests.fuzz.rare import directed
from tests.fuzz.shrink import shrink
from tests.fuzz.sketch import Sketch

ANY, PLANS = 5, 8
"""Meshes and plans a program: so many as they come, the others of what is rare among these (`rare.py`)."""


@dataclass
class Tally:
    """What has run so far: outcomes by kind, and one example of each sort that is not equal."""

    kinds: Counter[str] = field(default_factory=Counter)
    sorts: Counter[str] = field(default_factory=Counter)

    def add(self, found: Outcome, count: int = 1) -> bool:
        """Whether this is the first of its sort."""
        self.kinds[found.kind] += count
        if found.kind != "equal":
            self.sorts[found.sort] += count
        return self.sorts[found.sort] == count

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))


def run_program(seed: int, plans: int = PLANS, only: int | None = None, few_bits: bool = False) -> list[tuple[Case, Outcome]]:
    """All cases of one program, with their outcomes. `few_bits`: its products are rounded to a format."""
    sketch = draw_program(seed)
    train = sketch.loss and bool(sketch.of_kind("parameter"))
    line = f"precision *: {random.Random(f'{seed}:format').choice(SCALED)}" if few_bits else ""
    ready, how = prepared(sketch, train, draw_parts(random.Random(f"{seed}:parts"), sketch, train), line)
    if isinstance(ready, Outcome):
        return [(Case(sketch, train, "a=2", ("a: -",), how), ready)] * plans
    return [run_case(ready, seed, index, how) for index in range(plans) if only is None or index == only]


def prepared(sketch: Sketch, train: bool, how: How, line: str = "") -> tuple[Captured | Outcome, How]:
    """The sketch, traced; as the whole batch's step where its microbatches cannot be told apart."""
    ready = captured(sketch, train, how.parts, line)
    if how.mean_of_parts and isinstance(ready, Outcome) and not ready.failed:
        return captured(sketch, train, line=line), How()
    return ready, how


def run_case(ready: Captured, seed: int, index: int, how: How = PLAIN) -> tuple[Case, Outcome]:
    chance = random.Random(f"{seed}:{index}")
    how = draw_how(chance, ready.sketch, ready.train, how, reparse=index % 5 == 4)
    mesh = draw_mesh(chance, ready.sketch.batch if how.inputs == "local" else 0)
    plan = draw_plan(chance, ready.placed, mesh)
    if index >= ANY:
        plan, how = directed(chance, ready.sketch, ready.placed, mesh, plan, how)
    found = ready.check(mesh, plan, how)
    if found.kind == "refused" and how.microbatches > 1 and not how.mean_of_parts:  # most likely it mixes the batch
        how = replace(how, microbatches=1)
        found = ready.check(mesh, plan, how)
    return Case(ready.sketch, ready.train, str(mesh), (*plan.split("\n"), *filter(None, [ready.line])), how), found


def smallest(case: Case, found: Outcome, seconds: float) -> Case:
    """The smallest case found that fails by the same cause."""

    def fails(smaller: Case) -> bool:
        other = check_once(smaller)
        return (other.kind, other.cause) == (found.kind, found.cause)

    return shrink(case, fails, seconds)


def show(case: Case, found: Outcome, name: str) -> str:
    return case.script(f"{name}\n{case.how}") + "".join(f"# {line}\n" for line in found.why.splitlines()[:60])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--plans", type=int, default=PLANS, help="meshes and plans a program")
    parser.add_argument("--plan", type=int, default=None, help="only this one of each program's plans")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds for making a failing case smaller; 0: not at all")
    parser.add_argument("--out", type=Path, default=None, help="a folder for the scripts of failing cases")
    parser.add_argument("--few-bits", action="store_true", help="products with a weight in a format, drawn for each program")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally, begin = Tally(), time.monotonic()
    for number in range(-(-options.cases // options.plans)):
        seed = options.seed + number
        for index, (case, found) in enumerate(run_program(seed, options.plans, options.plan, options.few_bits), options.plan or 0):
            first = tally.add(found)
            if options.verbose and found.kind == "refused" and first:
                print(f"seed {seed}, plan {index}: {found.why}", flush=True)
            if found.failed and first:
                report(case, found, f"seed {seed}, plan {index}", options.shrink, options.out)
        if number % 20 == 19:
            print(f"after program {seed}: {tally}, {time.monotonic() - begin:.0f} s", flush=True)
    for sort, count in tally.sorts.most_common():
        print(f"{count:6d}  {sort}")
    print(f"{sum(tally.kinds.values())} cases from seed {options.seed}: {tally}, {time.monotonic() - begin:.0f} s")
    return int(any(tally.kinds[kind] for kind in ("unlike", "broken")))


def report(case: Case, found: Outcome, name: str, seconds: float, out: Path | None) -> None:
    """Print the smallest program that fails like this one, and keep it in `out`."""
    small = smallest(case, found, seconds) if seconds else case
    again = check_once(small) if small != case else found
    text = show(small, again, f"{name}: {found.kind}")
    print(f"---- {name}: {found.sort}\n{text}", flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name.replace(', ', '-').replace(' ', '')}.py").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
