"""Schedules that users give as functions, and how many stages they want on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshc
from meshc.passes.stages.schedules import build
from meshc.passes.stages.schedules.numbered_steps import number_microbatches
from meshc.pipelining.schedule import Action
from meshc.text import printer
from tests.models import nanogpt


def halves(ranks: int, stages: int, microbatches: int, costs: Any) -> list[list[Action]]:
    """All forwards and then all backwards of the first half of the microbatches, then those of the second."""
    first = microbatches // 2
    second = microbatches - first
    counts = [("F", first), ("B", first), ("F", second), ("B", second)]
    return [number_microbatches([(op, stage) for op, count in counts for _ in range(count)]) for stage in range(stages)]


def both(ranks: int, stages: int, microbatches: int, costs: Any) -> list[list[Action]]:
    """Stages in turn, ranks 0, 1, 0, 1: every forward of a stage, then every backward."""
    found = []
    for rank in range(ranks):
        mine = range(rank, stages, ranks)
        forward = [Action("F", stage, part) for stage in mine for part in range(microbatches)]
        found.append(forward + [Action("B", stage, part) for stage in reversed(mine) for part in range(microbatches)])
    return found


def step(microbatches: int | None, **options: Any) -> meshc.Program:
    case = nanogpt(layers=2, batch=8)
    train = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), 0.1), loss=case.loss, microbatches=microbatches)
    return meshc.compile(train, meshc.Mesh("pp=2"), kwargs=case.call_kwargs, options=meshc.Options(**options))


def test_a_function_is_a_schedule_and_is_saved_as_what_it_made() -> None:
    program = step(4, schedule=halves)
    pipeline = program.compiled.pipeline
    assert pipeline is not None
    assert pipeline.schedule == build(halves, ranks=2, microbatches=4, links=tuple(pipeline.messages))
    assert "schedule halves: 4 microbatches" in program.summary()
    meshc.verify(program)
    told = program.compiled.info["schedule"]
    assert told == str(pipeline.schedule)
    assert printer.hash_program(step(4, schedule=told).compiled) == printer.hash_program(program.compiled)


def test_stages_per_rank_are_as_many_as_asked() -> None:
    program = step(4, schedule=both, stages_per_rank=2)
    pipeline = program.compiled.pipeline
    assert pipeline is not None
    assert [pipeline.schedule.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert program.compiled.info["stages_per_rank"] == 2
    chosen = step(4, stages_per_rank=2).compiled.pipeline
    assert chosen is not None and chosen.schedule.stages == 4


def _raises(*given: Any) -> Any:
    raise ZeroDivisionError("no ranks")


@pytest.mark.parametrize(
    "function, said",
    [
        (_raises, r"_raises\(ranks=2, stages=2, microbatches=4, costs\) raised ZeroDivisionError: no ranks\n  what to do"),
        (lambda *given: None, "raised TypeError"),
        (lambda *given: [[]], "made lists for 1 rank; the pipeline has 2"),
        (lambda *given: [["F0.0"], []], "rank 0, position 0 is 'F0.0', no Action"),
        (lambda *given: [[Action("F", 0, 0)], []], "no rank runs stage 1"),
    ],
)
def test_a_function_that_makes_no_schedule_is_told_so(function: Callable[..., Any], said: str) -> None:
    with pytest.raises(meshc.ScheduleError, match=said):
        build(function, ranks=2, microbatches=4)


def test_a_function_that_leaves_something_out_is_told_what() -> None:
    with pytest.raises(meshc.ScheduleError, match="F0.1"):
        step(4, schedule=lambda *given: [[Action("F", 0, 0)], [Action("F", 1, 0)]])


def test_numbers_of_stages_that_cannot_be_are_refused() -> None:
    with pytest.raises(meshc.ScheduleError, match="1f1b has one stage on each rank"):
        step(4, schedule="1f1b", stages_per_rank=2)
    with pytest.raises(meshc.PlanError, match=r"pp_splits make 2 stages, but stages_per_rank=2 on .* is 4\n  what to do: name 3 modules"):
        step(4, pp_splits=["h.1"], stages_per_rank=2)
    with pytest.raises(meshc.PlanError, match=r"stages_per_rank=0\)\): at least 1"):
        meshc.Options(pipeline=meshc.Pipelining(stages_per_rank=0))
    with pytest.raises(meshc.PlanError, match="a schedule's name, its text, or a function"):
        meshc.Options(pipeline=meshc.Pipelining(schedule=3))  # type: ignore[arg-type]
