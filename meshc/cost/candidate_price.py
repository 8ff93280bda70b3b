"""Predicted seconds and bytes of a plan candidate whose program is compiled: by the clock and the memory walk."""

from __future__ import annotations

from dataclasses import replace

from meshc.cost import peak_memory
from meshc.cost.program_clock import program_seconds
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import PlainProgram


def price_candidate(candidate: PlanCandidate, program: PlainProgram) -> tuple[PlanCandidate, peak_memory.RankBytes]:
    """A candidate with what its program takes, and what the rank holds that needs most."""
    took, most = program_seconds(program), peak_memory.peak_rank(program)
    exposed = max(0.0, took.total - took.compute - took.idle)
    schedule = "" if program.pipeline is None else program.pipeline.schedule.name or "of your own"
    found = replace(candidate, seconds=took.total, compute=took.compute, exposed=exposed, idle=took.idle, holds=most.total)
    return replace(found, microbatches=program.microbatches, schedule=schedule), most
