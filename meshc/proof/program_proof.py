"""Proof of a program against a traced graph: its lines, for sizes of what is open, and its constants."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from meshc.ir.sizes import noted_relations
from meshc.program import instance
from meshc.program.in_flight import most_bytes
from meshc.program.program import PlainProgram, Stage
from meshc.proof.erasure import erase
from meshc.proof.memory import memory_faults
from meshc.proof.open_sizes import MOST, first_exception, served_sizes
from meshc.proof.outcome import ProgramProof, UnprovedLine


def prove(
    program: PlainProgram, traced: Stage, constants: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None = None
) -> ProgramProof:
    """The proof that a program is the traced graph, under the same keys, whose constants are `constants`; or what of it is not proved.

    `sizes`: of what is open, by name; without them for all that the program serves. Raises InputError for sizes that it does not serve.
    """
    start = time.perf_counter()
    proof = _prove(program, traced, constants) if not program.dynamic else _prove_open(program, traced, constants, sizes)
    if program.dynamic:
        at = [*instance.tried_sizes(program)][-1] if sizes is None else sizes
        program = instance.substitute_sizes(program, {size.symbol: at[size.name] for size in program.dynamic})
    in_flight = max(most_bytes(stage.graph.nodes) for stage in program.stages.values())
    return replace(proof, in_flight=in_flight, seconds=time.perf_counter() - start)


def _prove_open(
    program: PlainProgram, traced: Stage, constants: Mapping[str, torch.Tensor], sizes: Mapping[str, int] | None
) -> ProgramProof:
    """For all sizes at once; where that is not shown, for those that are asked for, or that it was compiled with."""
    if sizes is None and all(size.low == size.high for size in program.dynamic):
        sizes = {size.name: size.low for size in program.dynamic}
    chosen = {size.name: (sizes or {}).get(size.name, size.hint) for size in program.dynamic}
    alone = ", ".join(f"{size.name} {chosen[size.name]} (of {size.low} to {size.high})" for size in program.dynamic)
    if sizes is not None:
        instance.check(program, chosen)
    with noted_relations() as relations:
        proof = _prove(program, traced, constants)
    why = str(proof.failures[0]) if proof.failures else ""
    if proof.holds and sizes is not None:
        why = first_exception(relations, {size.symbol: np.array([chosen[size.name]]) for size in program.dynamic})
        proof.sizes = alone
    elif proof.holds:
        served, is_all = served_sizes(program.dynamic, program.constraints)
        why = first_exception(relations, served)
        proof.sizes = ", ".join(map(str, program.dynamic)) + ("" if is_all else f", of which {MOST:,} were looked at")
    if not why:
        return proof
    values = {size.symbol: chosen[size.name] for size in program.dynamic}
    single = _prove(instance.substitute_sizes(program, values), instance.substitute_in_stage(traced, values), constants)
    return replace(single, sizes=alone, not_for_all="" if sizes is not None else why)


def _prove(program: PlainProgram, traced: Stage, constants: Mapping[str, torch.Tensor]) -> ProgramProof:
    proof = erase(program, traced)
    for stage in program.stages.values():
        proof.failures += [UnprovedLine(stage.name, node, why) for node, why in memory_faults(stage, program.axis_sizes)]
    for name, value in constants.items():
        own = program.constants.get(name)
        if own is None or own.dtype != value.dtype or not torch.equal(own.cpu(), value.cpu()):
            stage = next(iter(program.stages.values()))
            why = f"the constant {name} is not the traced graph's"
            proof.failures.append(UnprovedLine(stage.name, next(iter(stage.graph.nodes)), why))
    return proof
