"""Predicted seconds and bytes of a plan candidate whose program is compiled: by the clock and the memory walk."""

from __future__ import annotations

from dataclasses import replace

from meshc.cost.peak_memory import RankBytes
from meshc.cost.stage_clock import Seconds
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import PlainProgram


def price_candidate(candidate: PlanCandidate, program: PlainProgram, took: Seconds, most: RankBytes) -> PlanCandidate:
    """A candidate with what its program `took` by the clock, and with the bytes of the rank that needs most."""
    exposed = max(0.0, took.total - took.compute - took.idle)
    schedule = "" if program.pipeline is None else program.pipeline.schedule.name or "of your own"
    found = replace(candidate, seconds=took.total, compute=took.compute, exposed=exposed, idle=took.idle, holds=most.total)
    return replace(found, microbatches=program.microbatches, schedule=schedule)
