"""A proof of each program that tests compile: one that is not proved fails its test, unless a mark says why it need not be."""

from __future__ import annotations

from dataclasses import dataclass

from meshc.errors import VerifyError
from meshc.passes.driver import compile_program as driver
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.program import PlainProgram
from meshc.proof.program_proof import prove


@dataclass
class Proofs:
    """How many programs were proved, in how many seconds; `wanted`: whether the next ones are to be."""

    programs: int = 0
    seconds: float = 0.0
    wanted: bool = True


PROOFS = Proofs()
finish = driver.finish


def finish_proved(lowered: LoweredProgram) -> PlainProgram:
    """The program of the last phase. Raises VerifyError if it is not proved."""
    program = finish(lowered)
    if PROOFS.wanted:
        joint = lowered.joint
        proof = prove(program, joint.as_stage(), joint.constants)
        PROOFS.programs += 1
        PROOFS.seconds += proof.seconds
        if not proof.holds or proof.not_for_all:
            raise VerifyError(str(proof))
    return program


def prove_all() -> None:
    """From here on each program that is compiled is proved."""
    driver.finish = finish_proved
