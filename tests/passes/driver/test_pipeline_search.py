"""The search for a pipeline's stages: one table of what was tried, with what each takes and holds, and why it was dropped."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

import meshc
from meshc.passes.phases.compilation_phase import CompilationPhase
from meshc.pipelining.pipeline_candidate import PipelineCandidate
from tests.models import nanogpt


@cache
def compiled(budget: int | None = None, microbatches: int | None = None, mesh: str = "pp=2", **options: object) -> meshc.Program:
    case = nanogpt(batch=4, seq=8, hidden=16, layers=2, heads=2, vocab=13)
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, microbatches=microbatches)
    return meshc.compile(
        step, meshc.Mesh(mesh), kwargs=case.call_kwargs, options=meshc.Options(memory_budget=budget, **options)  # type: ignore[arg-type]
    )


def taken(tried: tuple[PipelineCandidate, ...]) -> PipelineCandidate:
    (found,) = (each for each in tried if not each.dropped)
    return found


def test_of_the_numbers_of_microbatches_the_fastest_is_taken() -> None:
    program = compiled(schedule="1f1b")
    tried = program.lowered.tried
    assert [(each.microbatches, each.schedule) for each in tried] == [(1, "1f1b"), (2, "1f1b"), (4, "1f1b")]
    assert taken(tried).seconds == min(each.seconds for each in tried if each.seconds is not None)
    assert {each.dropped for each in tried} == {"", "slower than what is taken"}
    assert program.general.microbatches == program.lowered.request.microbatches == taken(tried).microbatches


@pytest.mark.broad
def test_what_does_not_fit_says_by_how_much() -> None:
    free = compiled(10**9, 4).lowered
    (first,) = (each for each in free.tried if not each.dropped)
    assert first.holds is not None
    tight = compiled(first.holds - 1, 4).lowered.tried
    (same,) = (each for each in tight if (each.schedule, each.cuts, each.again) == (first.schedule, first.cuts, 0))
    assert same.holds == first.holds and same.dropped == f"more than a rank may hold, {first.holds - 1:,} bytes" and same.seconds is None
    best = taken(tight)
    assert best.holds is not None and best.holds < first.holds


def test_what_cannot_be_is_in_the_table_with_its_reason() -> None:
    tried = compiled(10**9, 2, stages_per_rank=1).lowered.tried
    refused = {each.schedule: each.dropped for each in tried if each.seconds is None}
    assert refused == {
        "dualpipe_v": "dualpipe_v has 2 stages on each rank: 2 ranks take 4 stages, not 2",
        "zb_v": "zb_v has 2 stages on each rank: 2 ranks take 4 stages, not 2",
    }
    assert taken(tried).schedule not in refused


def test_the_summary_ends_with_what_was_tried() -> None:
    program = compiled(schedule="1f1b")
    found = taken(program.lowered.tried)
    title, heads, _, *rows = program.summary().partition("tried for the stages: ")[2].splitlines()
    assert title == "3 candidates (times of the microbatches alone)"
    assert heads.split() == ["microbatches", "schedule", "stages", "predicted"]
    assert [row.split()[0] for row in rows][0] == str(found.microbatches) and rows[0].endswith("  taken") and "1f1b" in rows[0]
    assert len(rows) == 3 and all(row.endswith("  slower than what is taken") for row in rows[1:])
    assert "tried for the stages" not in compiled(None, 2, mesh="dp=2").summary()


def test_nothing_is_searched_where_there_is_no_choice() -> None:
    assert compiled(None, 4, schedule="1f1b").lowered.tried == ()
    assert compiled(None, 2, mesh="dp=2").lowered.tried == ()


@pytest.mark.broad
def test_hooks_hear_of_the_passes_of_the_candidate_that_is_taken_and_of_no_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("dump")
    program = compiled(schedule="1f1b")
    program.dump(folder)
    names = [path.stem.split("_", 1)[1] for path in sorted(folder.glob("*.py"))]
    assert names.count("partition") == 1 and names.index("partition") < names.index("stages") < names.index("cut")
    assert f"{program.general.microbatches} microbatches" in (folder / "00_plan.txt").read_text() or program.general.microbatches == 1
    assert isinstance(program.lowered, CompilationPhase) and "search" in program.lowered.seconds


def test_a_model_that_only_the_whole_batch_can_run_has_one_microbatch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.cross_entropy)
    inputs = {"args": (torch.randn(8, 4),), "kwargs": {"target": torch.randint(3, (8,))}}
    tried = meshc.compile(step, meshc.Mesh("pp=2"), **inputs).lowered.tried  # type: ignore[arg-type]
    assert taken(tried).microbatches == 1
    assert {each.microbatches for each in tried} == {1, 2, 4, 8}
    assert all("whole batch" in each.dropped for each in tried if each.microbatches > 1)
