"""`Program.prove`: the traced graph of a program's model, and the proof of the program against it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from meshc.errors import CompileError
from meshc.proof.erasure import prove
from meshc.proof.outcome import ProgramProof, UnprovedLine
from meshc.proof.traced import TracedTerms

if TYPE_CHECKING:
    from meshc.api.handle import Program


def prove_program(program: Program) -> ProgramProof:
    start = time.perf_counter()
    compiled, lowered = program.compilations.last.made.compile_here()  # a program that is read from text says of no line what it is
    if program.general.dynamic:
        raise CompileError(
            "a program with open sizes cannot be proved yet\n"
            "  what to do: compile it without Options(dynamic=), for the sizes of one call, and prove that"
        )
    if lowered.parts is not None:
        raise CompileError(
            "a step that is the mean of its microbatches (batch_mix='mean_of_parts') cannot be proved yet\n"
            "  what to do: meshc.verify(program) compares its numbers"
        )
    joint = lowered.joint
    proof = prove(compiled, TracedTerms(joint.graph, [port.key for port in joint.inputs], [port.key for port in joint.outputs]))
    for name, value in joint.constants.items():
        own = compiled.constants.get(name)
        if own is None or own.dtype != value.dtype or not torch.equal(own.cpu(), value.cpu()):
            stage = next(iter(compiled.stages.values()))
            why = f"the constant {name} is not the traced graph's"
            proof.failures.append(UnprovedLine(stage.name, next(iter(stage.graph.nodes)), why))
    proof.seconds = time.perf_counter() - start
    return proof
