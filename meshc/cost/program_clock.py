"""Predicted seconds of one call of a program: the sum over its schedule or, of a pipeline, its timeline.

Stages of one rank do not overlap, but for collectives that start early. Ranks that run the same program wait for the slowest of them.
"""

from __future__ import annotations

from dataclasses import replace

from meshc.cost.call_timeline import predict_timeline
from meshc.cost.devices import Given, devices_of
from meshc.cost.instruction_clock import play_instructions
from meshc.cost.peak_memory import RankBytes
from meshc.cost.stage_clock import Seconds, stage_seconds
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import PlainProgram
from meshc.program.rank_instructions import ranks_of, steps_of

__all__ = ["Seconds", "price_candidate", "program_seconds", "stage_seconds"]


def program_seconds(program: PlainProgram, given: Given | None = None) -> Seconds:
    """One call of a program, on `given` devices or else the mesh's. Of a pipeline: the whole call, and what the rank does in it that is
    busy longest.

    Raises CompileError for an instruction that the cost model does not know.
    """
    devices = devices_of(program.mesh, given)
    ranks = [
        sum((took.seconds for took in play_instructions(program, steps_of(program, at), devices.slowest(at))), Seconds())
        for at in ranks_of(program)
    ]
    if program.pipeline is None:
        return ranks[0]
    most = max(ranks, key=lambda one: one.total)
    total = predict_timeline(program, given).call_s
    return replace(most, total=total, idle=total - most.total)


def price_candidate(candidate: PlanCandidate, program: PlainProgram, took: Seconds, most: RankBytes) -> PlanCandidate:
    """A candidate with what its program `took` by the clock, and with the bytes of the rank that needs most."""
    exposed = max(0.0, took.total - took.compute - took.idle)
    schedule = "" if program.pipeline is None else program.pipeline.schedule.name or "of your own"
    found = replace(candidate, seconds=took.total, compute=took.compute, exposed=exposed, idle=took.idle, holds=most.total)
    return replace(found, microbatches=program.microbatches, schedule=schedule)
