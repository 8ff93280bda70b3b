"""Attacks on operators and artifacts, in child processes, for as long as is asked: `make attack`, or

    python -m tests.attack --seconds 3600 --seed 0
    python -m tests.attack --case operators:123456789        one of them again, in this process

No case may end its child by a signal, take longer than 20 s of the processor, get an exception out that is none of meshc's, or take 500 MB.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from meshc.text.allowed import OPERATORS
from tests.attack import artifacts, children
from tests.attack.calls import run
from tests.attack.corpus import Call, by_schema, missing, recorded
from tests.attack.mutate import mutated
from tests.attack.pages import Fenced
from tests.attack.written import written

Case = Callable[[int], str | None]
Cases = tuple[Case, Callable[[int], str]]
"""A case by its number, and what it is in words."""
BATCH = 400
MOST_KIB = 500_000


def operators(samples: int = 3) -> tuple[Case, Callable[[int], str]]:
    """(a case by number, what its call was in words). Operators take turns; a number says all the rest."""
    calls = recorded(samples=samples)
    for call in written():
        calls.setdefault(call.name, []).append(call)
    unseen = missing(calls)
    names = sorted(OPERATORS)

    def drawn(number: int) -> tuple[Call, random.Random]:
        draw = random.Random(number)
        name = names[number % len(names)]
        return mutated(next(by_schema([name], draw)) if name in unseen else draw.choice(calls[name]), draw), draw

    def case(number: int) -> str | None:
        torch.manual_seed(number)
        call, draw = drawn(number)
        fenced = Fenced()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(call, fenced, draw.random() < 0.8)
        fenced.close()
        return _grown(before)

    def said(number: int) -> str:
        call, _ = drawn(number)
        words = pytree.tree_map(lambda leaf: _said(leaf) if isinstance(leaf, torch.Tensor) else leaf, (call.args, call.kwargs))
        return f"{call.name} {words}"

    return case, said


def _said(value: torch.Tensor) -> str:
    numbers = "" if value.is_floating_point() else f" {value.flatten()[:8].tolist()}"
    return f"{value.dtype} {list(value.shape)}{numbers}".removeprefix("torch.")


def _grown(before: int) -> str | None:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return f"it took {grown >> 10} MiB" if grown > MOST_KIB else None


def saved(folder: Path) -> tuple[Case, Callable[[int], str]]:
    known = artifacts.build(folder)

    def case(number: int) -> str | None:
        draw = random.Random(number)
        torch.manual_seed(number)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return artifacts.attack(draw.choice(known), folder / f"attacked-{number}", draw) or _grown(before)

    return case, lambda number: random.Random(number).choice(known).name


def main() -> int:
    parser = argparse.ArgumentParser("tests.attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--cases", type=int, help="of each kind, instead of for some seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="KIND:NUMBER, to be run in this process")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Callable[[], Cases]] = {"operators": operators, "artifacts": lambda: saved(Path(folder))}
        if asked.case:
            kind, _, number = asked.case.partition(":")
            case, said = kinds[kind]()
            print(said(int(number)), flush=True)
            print(case(int(number)) or "nothing is wrong")
            return 0
        tally, findings = _rounds({kind: make() for kind, make in kinds.items()}, asked.seconds, asked.cases, asked.seed)
    print(f"{', '.join(f'{count} {kind}' for kind, count in tally.items())}: {len(findings)} findings")
    return 1 if findings else 0


def _rounds(
    kinds: dict[str, tuple[Case, Callable[[int], str]]], seconds: float, cases: int | None, seed: int
) -> tuple[Counter[str], list[str]]:
    end, place, tally, findings = time.monotonic() + seconds, seed << 32, Counter[str](), list[str]()
    while (time.monotonic() < end) if cases is None else place < (seed << 32) + cases:
        for kind, (case, said) in kinds.items():
            numbers = range(place, place + min(BATCH, cases or BATCH))
            tally[kind] += len(numbers)
            for found in children.run(case, numbers):
                findings.append(f"{kind}:{found.index} {found.what}\n    {said(found.index)[:600]}")
                print(findings[-1], flush=True)
        place += BATCH
    return tally, findings


if __name__ == "__main__":
    sys.exit(main())
