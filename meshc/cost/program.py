"""What a program takes: its stages on a clock, its schedule's sum or, of a pipeline, its timeline.

Stages of one rank do not overlap, and all ranks are equally fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshc.cost import memory
from meshc.cost.call import predicted
from meshc.cost.clock import Seconds, stage_seconds
from meshc.cost.devices import Device
from meshc.errors import CompileError
from meshc.program.accumulate import ACCUMULATES
from meshc.program.program import Instruction, Program
from meshc.program.steps import steps_of

__all__ = ["Seconds", "program_seconds", "stage_seconds"]


def program_seconds(program: Program, device: Device) -> Seconds:
    """One call of a program. Of a pipeline: the whole call, and what the rank does in it that is busy longest.

    Raises CompileError for an instruction that it does not know.
    """
    stages = {name: stage_seconds(stage.graph, program.mesh, device) for name, stage in program.stages.items()}
    pipeline = program.pipeline
    if pipeline is None:
        return _busy(program, program.schedule, stages, device)
    ranks = [_busy(program, steps_of(program, {pipeline.axis: rank}), stages, device) for rank in range(pipeline.schedule.ranks)]
    most = max(ranks, key=lambda one: one.total)
    total = predicted(program, device).call_s
    return replace(most, total=total, idle=total - most.total)


def _busy(program: Program, steps: Sequence[Instruction], stages: Mapping[str, Seconds], device: Device) -> Seconds:
    """One rank's instructions, one after another. Messages between stages take it no time."""
    made = {key: size for stage in program.stages.values() for key, size in memory.output_bytes(stage).items()}
    sums: set[str] = set()
    total = Seconds()
    for instruction in steps:
        if instruction.op == "run":
            total += stages[instruction.stage]
        elif instruction.op in ACCUMULATES:
            if instruction.into in sums:  # the first part becomes the sum
                takes = device.launch_s + 3 * made[instruction.value] / device.bytes_per_s
                total += Seconds(takes, {}, takes)
            sums.add(instruction.into)
        elif instruction.op == "join":
            takes = device.launch_s + 2 * made[instruction.value] / device.bytes_per_s
            total += Seconds(takes, {}, takes)
        elif instruction.op not in ("send", "recv"):
            raise CompileError(f"the cost model does not know the instruction {instruction.op} of the schedule")
    return total
