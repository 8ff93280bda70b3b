"""From a pipeline's schedule to the instructions that one rank's runtime walks.

    RECV:F0.1>1  F1.1                 recv(flow:h of microbatch 1, from rank 0)   run(forward_1, 1)   add(part:loss -> sum:loss)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshc.pipelining.cut import Move, Pipeline, stage_name
from meshc.pipelining.schedule import Action, Instruction, Recv
from meshc.program import Instruction as Step
from meshc.program import Program, Stage


def steps_of(program: Program, coordinates: Mapping[str, int]) -> tuple[Step, ...]:
    """What the rank at these coordinates of the mesh does in one call."""
    if program.pipeline is None:
        return program.schedule
    return tuple(_steps(program.pipeline, program.stages, coordinates[program.pipeline.axis]))


def _steps(pipeline: Pipeline, stages: Mapping[str, Stage], rank: int) -> Iterator[Step]:
    yield from _moves(pipeline.shared, rank)
    yield from _once(f"before_{rank}", stages)
    for item in pipeline.schedule.lists[rank]:
        yield from _step(pipeline, stages, item)
    yield from _moves(pipeline.returned, rank)
    yield from _once(f"after_{rank}", stages)


def _once(name: str, stages: Mapping[str, Stage]) -> Iterator[Step]:
    if name in stages:
        yield Step("run", name)


def _moves(moves: tuple[Move, ...], rank: int) -> Iterator[Step]:
    for move in moves:
        if rank == move.source:
            yield Step("send", keys=(move.key,), peer=move.target)
        elif rank == move.target:
            yield Step("recv", keys=(move.key,), peer=move.source)


def _step(pipeline: Pipeline, stages: Mapping[str, Stage], item: Instruction) -> Iterator[Step]:
    if isinstance(item, Action):
        stage = stages[stage_name(item)]
        yield Step("run", stage.name, item.microbatch)
        for key in stage.outputs:
            if key.startswith("part:"):
                yield Step("add", stage.name, item.microbatch, key, "sum:" + key.removeprefix("part:"))
        return
    keys, of = pipeline.messages[item.message.link], item.message.of
    if isinstance(item, Recv):
        yield Step("recv", stage_name(of), of.microbatch, keys=keys, peer=pipeline.schedule.rank_of(of.stage))
    else:
        yield Step("send", stage_name(of), of.microbatch, keys=keys, peer=pipeline.schedule.rank_of(item.message.to))
