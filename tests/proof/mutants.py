"""Faults planted at random into proved programs: each that changes what a program computes is refused, by its types or by the proof.

    python -m tests.proof.mutants [--mutants 5000] [--seed 0]

What is refused neither by the checks of a saved program nor by the proof is run on all ranks: unless its results are those of the program,
to the bit, it has got through.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Final

import torch

import meshc
from meshc.check import check_program
from meshc.errors import MeshcError
from meshc.ir.graph import copy_graph
from meshc.ops.in_place import WRITERS
from meshc.program import instance
from meshc.program.program import PlainProgram, Stage
from meshc.proof.program_proof import prove
from meshc.runtime.simulator.passcheck import PassCheck
from meshc.runtime.simulator.simulation import simulate
from tests.golden.cases import CASES
from tests.proof import edited_schedules as _others  # noqa: F401 - adds its kinds
from tests.proof.edited_lines import KINDS
from tests.proof.programs import FEATURES

PROGRAMS: Final[dict[str, Callable[[], meshc.Program]]] = {**CASES, **FEATURES}
SIZES: Final = ((8, 12), (7, 13), (3, 5))
"""Of what is open, for runs."""


@dataclass(frozen=True)
class Base:
    """A proved program, and runs of it: sizes of what is open, what enters it, and what it gives."""

    program: PlainProgram
    traced: Stage
    constants: dict[str, torch.Tensor]
    runs: Sequence[tuple[dict[str, int], dict[str, torch.Tensor], dict[str, torch.Tensor]]]


@cache
def base(name: str) -> Base:
    made = PROGRAMS[name]()
    program, runs = made.general, []
    for row in SIZES if program.dynamic else SIZES[:1]:
        sizes = {size.symbol: one for size, one in zip(program.dynamic, row, strict=False)}
        at, checks = instance.substitute_sizes(program, sizes), PassCheck()
        checks._draw(at.inputs, at.constants)
        runs.append((sizes, checks.values, simulate(at, checks.values)))
    return Base(program, made.lowered.joint.as_stage(), dict(made.lowered.joint.constants), runs)


@dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    seed: int

    def program(self) -> PlainProgram | None:
        """The program with one fault; None if it has no place for it."""
        own = base(self.name).program
        copies = {key: replace(stage, graph=copy_graph(stage.graph)) for key, stage in own.stages.items()}
        found = KINDS[self.kind](replace(own, stages=copies), Random(f"{self.name}:{self.kind}:{self.seed}"))
        for stage in () if found is None else found.stages.values():
            stage.graph.eliminate_dead_code(lambda node: node.target in WRITERS or node.op in ("placeholder", "output"))
        return found

    def outcome(self) -> tuple[str, str]:
        """What becomes of it: no place, type, proof, equal, or through; and why."""
        found = self.program()
        if found is None:
            return "no place", ""
        try:
            check_program(found, "the mutant")
        except (MeshcError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            return "type", str(error)
        own = base(self.name)
        proof = prove(found, own.traced, own.constants)
        if not proof.holds or proof.not_for_all:
            return "proof", str(proof)
        for sizes, values, truth in own.runs:
            try:
                made = simulate(instance.substitute_sizes(found, sizes), values)
            except Exception as error:
                return "through", f"it does not run: {type(error).__name__} {error}"
            other = [key for key, value in truth.items() if key not in made or not torch.equal(made[key], value)]
            if other:
                return "through", f"{other[0]} is another"
        return "equal", ""


def drawn(count: int, seed: int, names: Sequence[str]) -> Iterator[Mutant]:
    """So many mutants, of all kinds in turn."""
    chance = Random(seed)
    kinds = chance.sample(list(KINDS), len(KINDS))
    for number in range(count):
        yield Mutant(chance.choice(names), kinds[number % len(kinds)], chance.randrange(1 << 30))


def with_place(count: int, seed: int, names: Sequence[str] = tuple(PROGRAMS)) -> Iterator[tuple[Mutant, str, str]]:
    """Mutants with what became of them, without those that have no place."""
    done, turn = 0, 0
    while done < count:
        for mutant in drawn(4 * count + len(KINDS), seed + turn, names):
            what, why = mutant.outcome()
            if what != "no place":
                yield mutant, what, why
                done += 1
                if done == count:
                    return
        turn += 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.proof.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mutants", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print each, with what refused it")
    asked = parser.parse_args(arguments)
    begin, kinds, tally = time.process_time(), Counter[str](), Counter[str]()
    wrong: list[str] = []
    for mutant, what, why in with_place(asked.mutants, asked.seed):
        kinds[mutant.kind] += 1
        tally[what] += 1
        if asked.verbose or what in ("equal", "through"):
            print(f"{what}: {mutant.name}, {mutant.kind}, {mutant.seed}: {why.splitlines()[0] if why else ''}", flush=True)
        wrong += [f"{mutant}"] if what == "through" else []
    never = [name for name in KINDS if name not in kinds]
    said = ", ".join(f"{count} {what}" for what, count in tally.most_common())
    rest = f"; without a place: {', '.join(never)}" if never else ""
    print(f"{sum(tally.values())} mutants of {len(kinds)} kinds: {said}; {time.process_time() - begin:.0f} s{rest}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
