"""Predicted start and seconds of each instruction of one rank; collectives that start within a run overlap it.

    computing   |each 0|each 1 ......|cat|after ..wait..|...|     reductions of sums start as each 1 computes the last of their parts;
    link                    |all_reduce |all_reduce |             their preparation (cat) takes computing time, counted after the run

Accumulation of sums is counted after the run, as if a run computed all its parts before adding the first; so is the time lost to
collectives that start within the run (the device's `contention`). These and the run's own collectives do not slow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from torch.fx import Graph, Node

from meshc.cost import peak_memory
from meshc.cost.devices import Device
from meshc.cost.pipeline_costs import accumulation_s
from meshc.cost.stage_clock import Clock, Seconds, run_clock, stage_seconds
from meshc.errors import CompileError
from meshc.program.accumulate import ACCUMULATES, whole_of
from meshc.program.program import Instruction, PlainProgram, Stage


@dataclass(frozen=True)
class InstructionCost:
    """Predicted start and seconds of an instruction."""

    step: Instruction
    start_s: float
    seconds: Seconds


def play_instructions(program: PlainProgram, steps: Sequence[Instruction], device: Device) -> Iterator[InstructionCost]:
    """The cost of each instruction of one rank, in order. Messages between stages take a rank no time. Raises CompileError for an
    instruction that the cost model does not know."""
    made = {key: size for stage in program.stages.values() for key, size in peak_memory.output_bytes(stage).items()}
    run = cache(partial(run_clock, mesh=program.mesh, device=device))
    sums: set[str] = set()
    due: dict[str, float] = {}
    within: dict[str, EarlyCollective] = {}
    now = ran_s = 0.0
    for position, step in enumerate(steps):
        stage = program.stages.get(step.stage)
        takes = Seconds()
        if step.op == "run" and stage is not None:
            if any(key in due for key in stage.inputs):
                takes = stage_seconds(stage.graph, program.mesh, device, arrival_seconds(stage, due, now))
            else:
                takes = run(stage.graph)[0]
            within = {one.start.name: one for one in early_collectives(stage, early_starts(program, steps, position), run)}
            due |= {key: now + one.end_s for one in within.values() for key in one.start.outputs}
            ran_s = takes.total
        elif step.op == "start" and stage is not None:
            alone = run(stage.graph)[0]
            lost = device.contention * within[stage.name].overlap_s(ran_s) if stage.name in within else 0.0
            takes = replace(alone, total=alone.compute + lost)
        elif step.op == "join" or step.op in ACCUMULATES:
            if step.op == "join" or step.into in sums:  # the first part becomes the sum
                seconds = accumulation_s(step.op, made[step.value], device)
                takes = Seconds(seconds, {}, seconds)
            sums.add(step.into)
        elif step.op not in ("send", "recv"):
            raise CompileError(f"the cost model does not know the instruction {step.op} of the schedule")
        yield InstructionCost(step, now, takes)
        now += takes.total


def early_starts(program: PlainProgram, steps: Sequence[Instruction], position: int) -> list[Stage]:
    """The stages with collectives that start within the run at this position."""
    found = []
    for behind in range(position + 1, len(steps)):  # by index, not a slice: the schedule is long, and few steps are looked at
        step = steps[behind]
        if step.op in ("run", "send", "recv"):
            break
        if step.op == "start":
            found.append(program.stages[step.stage])
    return found


@dataclass(frozen=True)
class EarlyCollective:
    """Time on the link of a collective that starts within a run, in seconds from the run's start."""

    start: Stage
    begin_s: float
    end_s: float

    def overlap_s(self, run_s: float) -> float:
        """Seconds for which the collective overlaps with the run."""
        return max(0.0, min(self.end_s, run_s) - self.begin_s)


def early_collectives(
    stage: Stage, starts: Sequence[Stage], run: Callable[[Graph], tuple[Seconds, Clock[Node]]]
) -> list[EarlyCollective]:
    """The collectives of `starts`, which start within a run of `stage`. `run`: the clock after a run of each graph on the rank's device."""
    if not starts:
        return []
    made = run(stage.graph)[1].made
    whole = {way[1]: made[value] for key, value in stage.results().items() if (way := whole_of(key)) is not None}
    found: list[EarlyCollective] = []
    ready = free = 0.0
    for start in starts:
        alone = run(start.graph)[0]
        ready = max([ready, *(whole.get(key, 0.0) for key in start.inputs)]) + alone.compute
        begin, free = max(ready, free), max(ready, free) + sum(alone.communication.values())
        found.append(EarlyCollective(start, begin, free))
    return found


def arrival_seconds(stage: Stage, due: Mapping[str, float], now: float) -> dict[Node, float]:
    """Inputs that are in flight when a stage starts at `now`, with the seconds until each arrives."""
    return {node: max(due[key] - now, 0.0) for node, key in stage.keys().items() if key in due}
