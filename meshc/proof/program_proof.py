"""Proof of a program against a traced graph: its lines, for sizes of what is open, and its constants."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from meshc.program import instance
from meshc.program.program import PlainProgram, Stage
from meshc.proof.erasure import erase
from meshc.proof.memory import memory_faults
from meshc.proof.outcome import ProgramProof, UnprovedLine


def prove(
    program: PlainProgram, traced: Stage, constants: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None
) -> ProgramProof:
    """The proof that a program is the traced graph, under the same keys, whose constants are `constants`; or what of it is not proved.

    `sizes`: of what is open, by name; else those that it was compiled with. Raises InputError for sizes that it does not serve.
    """
    start, opened = time.perf_counter(), ""
    if program.dynamic:
        chosen = {size.name: (sizes or {}).get(size.name, size.hint) for size in program.dynamic}
        opened = ", ".join(f"{size.name} {chosen[size.name]} (of {size.low} to {size.high})" for size in program.dynamic)
        values = {size.symbol: chosen[size.name] for size in program.dynamic}
        if sizes is not None:
            instance.check(program, chosen)
        program, traced = instance.substitute_sizes(program, values), instance.substitute_in_stage(traced, values)
    proof = erase(program, traced)
    for stage in program.stages.values():
        proof.failures += [UnprovedLine(stage.name, node, why) for node, why in memory_faults(stage, program.axis_sizes)]
    for name, value in constants.items():
        own = program.constants.get(name)
        if own is None or own.dtype != value.dtype or not torch.equal(own.cpu(), value.cpu()):
            stage = next(iter(program.stages.values()))
            why = f"the constant {name} is not the traced graph's"
            proof.failures.append(UnprovedLine(stage.name, next(iter(stage.graph.nodes)), why))
    return replace(proof, sizes=opened, seconds=time.perf_counter() - start)
