"""`Program.prove` and `meshc prove`: the traced graph of a program's model, and the proof of the program against it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from meshc.ir.sizes import Dynamic
from meshc.program import instance
from meshc.program.program import PlainProgram, Stage
from meshc.proof.erasure import prove
from meshc.proof.outcome import ProgramProof, UnprovedLine

if TYPE_CHECKING:
    from meshc.api.handle import Program


def prove_program(program: Program, sizes: Mapping[str, int] | None = None) -> ProgramProof:
    start = time.perf_counter()
    compiled, lowered = program.compilations.last.made.compile_here()
    proof = prove_compiled(compiled, lowered.joint.as_stage(), lowered.joint.constants, sizes)
    return replace(proof, seconds=time.perf_counter() - start)


def prove_compiled(
    program: PlainProgram, traced: Stage, constants: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None
) -> ProgramProof:
    """The proof of a program against a traced graph whose constants are `constants`. `sizes`: of what is open, by name; else those that it
    was compiled with. Raises InputError for sizes that it does not serve."""
    start, opened = time.perf_counter(), ""
    if program.dynamic:
        chosen = {size.name: (sizes or {}).get(size.name, size.hint) for size in program.dynamic}
        opened = ", ".join(f"{size.name} {chosen[size.name]} (of {_range(size)})" for size in program.dynamic)
        values = {size.symbol: chosen[size.name] for size in program.dynamic}
        if sizes is not None:
            instance.check(program, chosen)
        program, traced = instance.substitute_sizes(program, values), instance.substitute_in_stage(traced, values)
    proof = prove(program, traced)
    for name, value in constants.items():
        own = program.constants.get(name)
        if own is None or own.dtype != value.dtype or not torch.equal(own.cpu(), value.cpu()):
            stage = next(iter(program.stages.values()))
            why = f"the constant {name} is not the traced graph's"
            proof.failures.append(UnprovedLine(stage.name, next(iter(stage.graph.nodes)), why))
    return replace(proof, sizes=opened, seconds=time.perf_counter() - start)


def _range(size: Dynamic) -> str:
    return f"{size.low} to {size.high}"
