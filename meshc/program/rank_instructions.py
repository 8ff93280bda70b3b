"""Lowering of a pipeline schedule to the instructions of one rank; their timeline items, and the values that each is the last to read.

    RECV:F0.1>1  F1.1                 recv(flow:h of microbatch 1, from rank 0)   run(forward_1, 1)   add(part:loss -> sum:loss)
    B1.1                              run(backward_1, 1)   add(part:g -> sum:g)   start(start_1_all_reduce)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from meshc.ir.keys import is_a
from meshc.pipelining.events import CallTransfer, Item, StageRun
from meshc.pipelining.pipeline_stages import Move, Pipeline, Start, slot, stage_name
from meshc.pipelining.schedule import Action, Instruction, Recv
from meshc.program.accumulate import WHOLES, whole_of
from meshc.program.program import Instruction as Step
from meshc.program.program import PlainProgram, Stage


class InstructionSource(Protocol):
    """The part of a program, complete or not, that a rank's instructions are derived from."""

    @property
    def stages(self) -> Mapping[str, Stage]: ...
    @property
    def schedule(self) -> tuple[Step, ...]: ...
    @property
    def pipeline(self) -> Pipeline | None: ...


def ranks_of(program: InstructionSource) -> list[dict[str, int]]:
    """Coordinates of one rank for each list of instructions that differs from others'."""
    pipeline = program.pipeline
    return [{}] if pipeline is None else [{pipeline.axis: rank} for rank in range(pipeline.schedule.ranks)]


def steps_of(program: InstructionSource, coordinates: Mapping[str, int]) -> tuple[Step, ...]:
    """The instructions of the rank at these mesh coordinates, for one call."""
    if program.pipeline is None:
        return program.schedule
    return tuple(step for step, _ in _steps_and_items(program.pipeline, program.stages, coordinates[program.pipeline.axis]))


def items_of(program: InstructionSource, coordinates: Mapping[str, int]) -> tuple[Item | None, ...]:
    """The timeline item of each of these instructions; None for one that belongs to the run before it, such as an add."""
    pipeline = program.pipeline
    if pipeline is None:
        return tuple(StageRun(step.stage, step.microbatch) if step.op == "run" else None for step in program.schedule)
    return tuple(item for _, item in _steps_and_items(pipeline, program.stages, coordinates[pipeline.axis]))


def last_reads(program: PlainProgram, steps: Sequence[Step]) -> list[frozenset[str]]:
    """For each instruction, the values of its microbatch, and of all microbatches together, that it is the last to read."""
    found: list[frozenset[str]] = []
    seen: set[str] = set()
    for step in reversed(steps):
        slots = {slot(key, step.microbatch) for key in step.reads(program.stages) if is_a(key, "flow", "early", *WHOLES)}
        found.append(frozenset(slots - seen))
        seen |= slots
    return found[::-1]


def _steps_and_items(pipeline: Pipeline, stages: Mapping[str, Stage], rank: int) -> Iterator[tuple[Step, Item | None]]:
    yield from _moves(pipeline.shared, rank)
    yield from _once(f"before_{rank}", stages)
    starts = _starts(pipeline)
    for item in pipeline.schedule.lists[rank]:
        first, *more = _step(pipeline, stages, starts, item)
        yield first, item
        yield from ((step, None) for step in more)
    yield from _moves(pipeline.returned, rank)
    yield from _once(f"after_{rank}", stages)


def _once(name: str, stages: Mapping[str, Stage]) -> Iterator[tuple[Step, Item]]:
    if name in stages:
        yield Step("run", name), StageRun(name)


def _moves(moves: Sequence[Move], rank: int) -> Iterator[tuple[Step, Item]]:
    for move in moves:
        for op, mine, other in (("send", move.source, move.target), ("recv", move.target, move.source)):
            if rank == mine:
                yield Step(op, keys=(move.key,), peer=other), CallTransfer(op.upper(), move.key, move.source, move.target)


def _starts(pipeline: Pipeline) -> dict[Action, list[Start]]:
    found: dict[Action, list[Start]] = {}
    for start in pipeline.starts:
        found.setdefault(start.during, []).append(start)
    return found


def _step(
    pipeline: Pipeline, stages: Mapping[str, Stage], starts: Mapping[Action, Sequence[Start]], item: Instruction
) -> Iterator[Step]:
    if isinstance(item, Action):
        stage = stages[stage_name(item)]
        yield Step("run", stage.name, item.microbatch)
        for key in stage.outputs:
            if (found := whole_of(key)) is not None:
                yield Step(found[0], stage.name, item.microbatch, key, found[1])
        for start in starts.get(item, ()):
            yield Step("start", start.stage, item.microbatch, keys=start.keys, during=stage.name)
        return
    keys, of = pipeline.messages[item.message.link], item.message.of
    op, other = ("recv", of.stage) if isinstance(item, Recv) else ("send", item.message.to)
    yield Step(op, stage_name(of), of.microbatch, keys=keys, peer=pipeline.schedule.rank_of(other))
