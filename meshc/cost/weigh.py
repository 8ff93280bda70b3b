"""What a plan comes to whose program is there: by the clock and by the memory walk."""

from __future__ import annotations

from dataclasses import replace

from meshc.cost import memory
from meshc.cost.devices import Device
from meshc.cost.program import program_seconds
from meshc.plan.weighed import Weighed
from meshc.program.program import PlainProgram


def weigh(candidate: Weighed, program: PlainProgram, device: Device) -> tuple[Weighed, memory.RankBytes]:
    """A candidate with what its program takes, and what the rank holds that needs most."""
    took, most = program_seconds(program, device), memory.worst(program)
    exposed = max(0.0, took.total - took.compute - took.idle)
    schedule = "" if program.pipeline is None else program.pipeline.schedule.name or "of your own"
    found = replace(candidate, seconds=took.total, compute=took.compute, exposed=exposed, idle=took.idle, holds=most.total)
    return replace(found, microbatches=program.microbatches, schedule=schedule), most
