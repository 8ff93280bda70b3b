"""Predicted seconds of one call of a program: the sum over its schedule or, of a pipeline, its timeline.

Stages of one rank do not overlap, except for collectives that start early; all ranks are equally fast.
"""

from __future__ import annotations

from dataclasses import replace

from meshc.cost.call_timeline import predict_timeline
from meshc.cost.devices import Device
from meshc.cost.instruction_clock import play_instructions
from meshc.cost.stage_clock import Seconds, stage_seconds
from meshc.program.program import PlainProgram
from meshc.program.rank_instructions import ranks_of, steps_of

__all__ = ["Seconds", "program_seconds", "stage_seconds"]


def program_seconds(program: PlainProgram, device: Device) -> Seconds:
    """Seconds of one call of a program; in a pipeline, the whole call's total with the busiest rank's parts.

    Raises CompileError for an instruction that the cost model does not know.
    """
    ranks = [
        sum((took.seconds for took in play_instructions(program, steps_of(program, rank), device)), Seconds()) for rank in ranks_of(program)
    ]
    if program.pipeline is None:
        return ranks[0]
    most = max(ranks, key=lambda one: one.total)
    total = predict_timeline(program, device).call_s
    return replace(most, total=total, idle=total - most.total)
