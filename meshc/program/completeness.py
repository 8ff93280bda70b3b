"""Completeness check of a pipelined program: every stage exists, and every value is computed or received before it is read.

    1: RECV:F0.0>1 F1.0 ...      F1.0 runs forward_1, which reads flow:h: in the message F0>1, which forward_0 makes, or a fault
"""

from __future__ import annotations

from collections.abc import Iterator

from meshc.errors import ScheduleError
from meshc.ir.keys import key_of
from meshc.pipelining.check import check
from meshc.pipelining.pipeline_stages import Pipeline, slot, stage_name
from meshc.program.accumulate import ACCUMULATES
from meshc.program.program import RUNS, Instruction, PlainProgram
from meshc.program.rank_instructions import steps_of


def refuse_incomplete(program: PlainProgram) -> None:
    """Raises ScheduleError, which lists the faults of a program's pipeline, if the program has one."""
    pipeline = program.pipeline
    if pipeline is None:
        return
    faults = [*_places(program, pipeline)] or [*_unknown_stages(program, pipeline)]
    if not faults:
        stages = sum(name.startswith("forward_") for name in program.stages)
        trains = any(name.startswith(("backward_", "input_", "weight_")) for name in program.stages)  # linear ones may need no backward
        check(pipeline.schedule, pipeline.messages, stages=stages, microbatches=program.microbatches, trains=trains)
        faults = [fault for rank in range(pipeline.schedule.ranks) for fault in _Rank(program, pipeline, rank).faults()]
    if faults:
        more = [f"and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise ScheduleError("\n  ".join(["the pipeline cannot run:", *faults[:20], *more]))


def _places(program: PlainProgram, pipeline: Pipeline) -> Iterator[str]:
    axis = program.mesh.pipeline_axis
    if axis is None or pipeline.axis != axis.name:
        yield f"the mesh {program.mesh} has no pipeline axis {pipeline.axis!r}"
        return
    if pipeline.schedule.ranks != axis.size:
        yield f"the schedule has {pipeline.schedule.ranks} lists, for the {axis.size} ranks of {axis}"
    known = {port.key for port in (*program.inputs, *program.outputs)}
    for key, rank in pipeline.owners.items():
        if rank >= axis.size:
            yield f"owners: {key} is at place {rank} of {axis}, whose places are 0 to {axis.size - 1}"
        if key not in known:
            yield f"owners: {key} is nothing that the program takes or gives"
    for move in (*pipeline.shared, *pipeline.returned):
        if max(move.source, move.target) >= axis.size or move.source == move.target:
            yield f"{move.key} goes from place {move.source} to {move.target} of {axis}, whose places are 0 to {axis.size - 1}"


def _unknown_stages(program: PlainProgram, pipeline: Pipeline) -> Iterator[str]:
    schedule = pipeline.schedule
    found = [frozenset(actions) for actions in schedule.actions]
    for rank, actions in enumerate(schedule.actions):
        line = f" (line {schedule.lines[rank]})" if schedule.lines else ""
        for name in dict.fromkeys(map(stage_name, actions)):
            if name not in program.stages:
                yield f"rank {rank}{line} runs {name}, but the stages are {', '.join(program.stages)}"
    for start in pipeline.starts:
        if start.stage not in program.stages:
            yield f"starts: {start.stage!r:.80} is no stage; the stages are {', '.join(program.stages)}"
        if not any(start.during in actions for actions in found):
            yield f"starts: {start.stage} starts within {start.during}, which no rank runs"
    count = sum(name.startswith("forward_") for name in program.stages)
    if program.microbatches * count != sum(action.op == "F" for actions in schedule.actions for action in actions):
        yield f"the schedule is not one of {count} stages and {program.microbatches} microbatches: each has a forward of each"


class _Rank:
    """Replay of one pipeline rank's instructions, with the set of keys that are there; other coordinates do not matter."""

    def __init__(self, program: PlainProgram, pipeline: Pipeline, rank: int) -> None:
        self.program, self.rank, self.coordinates = program, rank, {pipeline.axis: rank}
        self.there = {port.key for port in program.inputs if program.owns(port.key, self.coordinates)}
        self.there |= {key_of("constant", name) for name in program.constants}
        makers = [stage for stage in program.stages.values() if not stage.name.startswith(("before_", "after_"))]
        self.made = {key for stage in makers for key in stage.outputs}

    def faults(self) -> Iterator[str]:
        for step in steps_of(self.program, self.coordinates):
            for key in step.reads(self.program.stages):
                if slot(key, step.microbatch) not in self.there:
                    yield f"rank {self.rank}: {_step_text(step)} needs {key}, which is not there{self._where(step, key)}"
            if step.op in ("join", *ACCUMULATES):
                if step.value not in self.there:
                    yield f"rank {self.rank}: {step.op} takes {step.value} into {step.into}, which is not there"
                self.there.discard(step.value)  # a part is taken once
            self.there |= {slot(key, step.microbatch) for key in self._makes(step)}
            if step.op == "recv" and step.stage:
                unmade = [key for key in step.keys if key not in self.made]
                yield from (f"rank {self.rank}: nothing makes {key}, which {step.stage} would send" for key in unmade)
        for port in self.program.outputs:
            if self.program.owns(port.key, self.coordinates) and port.key not in self.there:
                yield f"rank {self.rank}: no stage of it gives {port.key}"

    def _where(self, step: Instruction, key: str) -> str:
        """The line of the stage's text that reads `key`; empty if the stage was not parsed from text."""
        stage = self.program.stages[step.stage] if step.op in RUNS else None
        if stage is None or stage.origin is None:
            return ""
        name = next(node.name for node, own in stage.keys().items() if own == key)
        return f": {stage.origin.file}, line {stage.origin.at.get(name, 0)} reads it"

    def _makes(self, step: Instruction) -> tuple[str, ...]:
        if step.op in RUNS:
            return self.program.stages[step.stage].outputs
        return (step.into,) if step.op in ("join", *ACCUMULATES) else step.keys


def _step_text(step: Instruction) -> str:
    return f"{step.op} {step.stage} of microbatch {step.microbatch}" if step.stage else f"{step.op} {', '.join(step.keys)}"
