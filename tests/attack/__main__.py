"""Attacks on operators and artifacts, in child processes, for as long as is asked: `make attack`, or

    python -m tests.attack --seconds 3600 --seed 0
    python -m tests.attack --case operators:123456789        one of them again, in this process
    python -m tests.attack --corners                         before the hour: each call of the corpus with one thing at its extreme

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

from meshc.text.allowed_operators import OPERATORS
from tests.attack import artifacts, children
from tests.attack.calls import run
from tests.attack.corners import corners, made
from tests.attack.corpus import Call, by_schema, missing, recorded
from tests.attack.mutate import mutated
from tests.attack.pages import Fenced
from tests.attack.written import written

Case = Callable[[int], str | None]
Cases = tuple[Case, Callable[[int], str]]
"""A case by its number, and what it is in words."""
BATCH = 400
MOST_KIB = 500_000


def known(samples: int) -> dict[str, list[Call]]:
    calls = recorded(samples=samples)
    for call in written():
        calls.setdefault(call.name, []).append(call)
    return calls


def operators(samples: int = 3) -> tuple[Case, Callable[[int], str]]:
    """(a case by number, what its call was in words). Operators take turns; a number says all the rest."""
    calls = known(samples)
    unseen = missing(calls)
    names = sorted(OPERATORS)

    def drawn(number: int) -> tuple[Call, random.Random]:
        draw = random.Random(number)
        name = names[number % len(names)]
        return mutated(next(by_schema([name], draw)) if name in unseen else draw.choice(calls[name]), draw), draw

    def case(number: int) -> str | None:
        torch.manual_seed(number)
        call, draw = drawn(number)
        return _attacked(call, draw.random() < 0.8)

    return case, lambda number: _in_words(drawn(number)[0])


def in_corners(samples: int = 3) -> tuple[Case, Callable[[int], str], int]:
    """Likewise, of every call with one thing at its extreme; and how many there are."""
    found = [corner for _, calls in sorted(known(samples).items()) for call in calls for corner in corners(call)]

    def case(number: int) -> str | None:
        torch.manual_seed(number)
        return _attacked(made(found[number]), number % 5 != 0)

    return case, lambda number: _in_words(made(found[number])), len(found)


def _attacked(call: Call, at_end: bool) -> str | None:
    fenced = Fenced()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(call, fenced, at_end)
    fenced.close()
    return _grown(before)


def _in_words(call: Call) -> str:
    words = pytree.tree_map(lambda leaf: _said(leaf) if isinstance(leaf, torch.Tensor) else leaf, (call.args, call.kwargs))
    return f"{call.name} {words}"


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
    parser.add_argument("--corners", action="store_true", help="every call with one thing at its extreme, and nothing else")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.corners:
        return _corners()
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, Callable[[], Cases]] = {"operators": operators, "artifacts": lambda: saved(Path(folder))}
        if asked.case:
            kind, _, number = asked.case.partition(":")
            kinds["corners"] = lambda: in_corners()[:2]
            case, said = kinds[kind]()
            print(said(int(number)), flush=True)
            print(case(int(number)) or "nothing is wrong")
            return 0
        tally, findings = _rounds({kind: make() for kind, make in kinds.items()}, asked.seconds, asked.cases, asked.seed)
    print(f"{', '.join(f'{count} {kind}' for kind, count in tally.items())}: {len(findings)} findings")
    return 1 if findings else 0


def _corners() -> int:
    case, said, count = in_corners()
    findings = 0
    for start in range(0, count, BATCH):
        for found in children.run(case, range(start, min(start + BATCH, count))):
            findings += 1
            print(f"corners:{found.index} {found.what}\n    {said(found.index)[:600]}", flush=True)
    print(f"{count} corners: {findings} findings")
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
