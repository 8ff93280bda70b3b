"""A program stage by stage, in a proof: the order in which they are walked, and what the schedule must do.

Stages of a pipeline that have collectives with each other are walked in lock step. A part of each microbatch is, under the key of the
whole, what all of them come to: it is reduced or joined over the axis of microbatches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from torch.fx import Node

from meshc import ir
from meshc.errors import ScheduleError
from meshc.ir import record, spmd
from meshc.program.accumulate import ACCUMULATES, whole_of
from meshc.program.completeness import refuse_incomplete
from meshc.program.program import RUNS, PlainProgram, Stage


def in_order(program: PlainProgram) -> Iterator[list[Stage]]:
    """Stages, each behind those that make what it reads; those that meet, together."""
    left = dict(program.stages)
    made_by: dict[str, set[str]] = defaultdict(set)
    for name, stage in left.items():
        for key in stage.outputs:
            made_by[key].add(name)
            if (whole := whole_of(key)) is not None:
                made_by[whole[1]].add(name)
    joining = {name for name, stage in left.items() if any(map(spmd.joins_stages, ir.calls(stage.graph)))}
    groups = [{name for name in joining if name.startswith(when)} for when in ("before_", "after_")]
    entering = {port.key for port in program.inputs}

    def is_ready(name: str, besides: Collection[str]) -> bool:
        return all(key in entering or not (made_by[key] & left.keys() - {name, *besides}) for key in left[name].inputs)

    while left:
        ready = [[name] for name in left if name not in joining and is_ready(name, ())]
        meeting = [group for group in groups if group and group <= left.keys() and all(is_ready(name, group) for name in group)]
        ready += [sorted(group, key=lambda name: int(name.rpartition("_")[2])) for group in meeting]
        for names in ready or [list(left)]:
            yield [left[name] for name in names]
            for name in names:
                del left[name]


def _faults_of_keys(program: PlainProgram) -> Iterator[str]:
    """A message where a stage takes a value in another shape or dtype than the stage that makes it, which may be sent, has it."""
    made: dict[str, Node] = {}
    for stage in program.stages.values():
        for key, node in stage.results().items():
            made[key] = node
            if (whole := whole_of(key)) is not None and whole[0] in ACCUMULATES:
                made[whole[1]] = node
    for name, stage in program.stages.items():
        for node, key in stage.keys().items():
            own, other = record(node), record(made.get(key, node))
            if (own.shape, own.dtype) != (other.shape, other.dtype):
                yield f"{name} takes {key} as {own.dtype} {list(own.shape)}, and it is made as {other.dtype} {list(other.shape)}"


def schedule_faults(program: PlainProgram) -> Iterator[str]:
    """A message where a microbatch does not run once, its part is not in its whole once, or a value is passed on as another type."""
    yield from _faults_of_keys(program)
    if program.pipeline is not None:
        try:
            refuse_incomplete(program)
        except ScheduleError as error:
            yield str(error)
        return
    runs: Counter[tuple[str, int]] = Counter()
    taken: Counter[tuple[str, str, int]] = Counter()
    whole: Counter[str] = Counter()
    parts = {found[1] for stage in program.stages.values() for key in stage.outputs if (found := whole_of(key)) is not None}
    there = {port.key for port in program.inputs}
    for step in program.schedule:
        if step.op in RUNS:
            runs[step.stage, step.microbatch] += 1
            stage = program.stages[step.stage]
            early = [key for key in stage.inputs if (whole[key] < program.microbatches if key in parts else key not in there)]
            yield from (f"the schedule {step.op}s {step.stage} before {key} is complete, which it reads" for key in early)
            there.update(stage.outputs)
        else:
            taken[step.stage, step.value, step.microbatch] += 1
            whole[step.into] += 1
    for name in program.stages if program.schedule else ():
        each = [runs[name, at] for at in range(program.microbatches)]
        if sum(each) != 1 and each != [1] * program.microbatches:
            yield f"the schedule runs {name} {' + '.join(map(str, each))} times: once for all, or once for each microbatch, is meant"
    for name, stage in program.stages.items():
        for key in stage.outputs:
            times = {(taken[name, key, at], runs[name, at]) for at in range(program.microbatches)}
            if whole_of(key) is not None and times != {(1, 1)}:
                yield f"the schedule takes {key} of some microbatch more than once, or never"
