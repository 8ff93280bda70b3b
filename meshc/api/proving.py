"""`Program.prove`: the proof of a program against its model's traced graph, and the pass that made what is not proved."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from meshc.lazy_module import LazyModule
from meshc.proof.outcome import ProgramProof
from meshc.proof.program_proof import prove
from meshc.runtime.state.ownership import calls_allowed

if TYPE_CHECKING:
    from meshc.api.handle import Program
    from meshc.passes.driver import hooks
else:
    hooks = LazyModule("meshc.passes.driver.hooks")


def prove_program(program: Program, sizes: Mapping[str, int] | None = None) -> ProgramProof:
    start, made_by = time.perf_counter(), ""
    compiled, lowered = program.compilations.last.made.compile_here()
    proof = prove(compiled, lowered.joint.as_stage(), lowered.joint.constants, sizes)
    if not proof.holds:
        with calls_allowed(lowered.request.module), torch.set_grad_enabled(lowered.request.grad):
            made_by = hooks.first_unproved_pass(lowered.request)
    return replace(proof, seconds=time.perf_counter() - start, made_by=made_by)
