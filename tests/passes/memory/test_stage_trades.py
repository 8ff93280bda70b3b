"""A budget over a pipeline: each rank recomputes as little as it must, by the microbatches that it has in flight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import calls, op_name
from meshc.pipelining.pipeline_candidate import PipelineCandidate
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt


def step_of(case: Case, mesh: str, budget: int | None, schedule: str | None, microbatches: int | None = 4) -> meshc.Program:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    options = meshc.Options(memory_budget=budget, pipeline=meshc.Pipelining(schedule=schedule))
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, options=options)


def taken(program: meshc.Program) -> PipelineCandidate:
    (found,) = (each for each in program.lowered.tried if not each.dropped)
    return found


@pytest.mark.parametrize(
    "make, mesh, schedule, share",
    [
        (nanogpt, "pp=2", "1f1b", 0.9), broad(nanogpt, "pp=2", None, 0.85), broad(nanogpt, "pp=2,tp=2", "zb_h1", 0.9),
        broad(partial(nanogpt, layers=4), "pp=2", "interleaved", 0.8), broad(partial(nanogpt, layers=4), "pp=2", "gpipe", 0.7),
        broad(llama, "pp=2,dp=2", "1f1b", 0.9), broad(llama, "pp=2,tp=2", "zb_v", 0.9),
        broad(partial(gpt2, layers=4), "pp=2", "1f1b", 0.85),
    ],
    ids=lambda value: getattr(value, "func", value).__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_budget_is_kept_and_a_step_means_what_it_means(make: Callable[..., Case], mesh: str, schedule: str | None, share: float) -> None:
    budget = int(share * peak_memory.peak_rank(step_of(make(batch=16), mesh, None, schedule).compiled).total)
    program = step_of(make(batch=16), mesh, budget, schedule)
    assert peak_memory.peak_rank(program.compiled).total <= budget and taken(program).again > 0
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}


def deep(budget: int | None) -> meshc.Program:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss, microbatches=4)
    options = meshc.Options(memory_budget=budget, pipeline=meshc.Pipelining(schedule="1f1b", splits=["2"]))
    return meshc.compile(
        step, meshc.Mesh("pp=2"), args=(torch.zeros(256, 16),), kwargs={"target": torch.zeros(256, 16)}, plan="", options=options
    )


def copies(program: meshc.Program, stage: int) -> int:
    """Forward's operators in a stage's backward."""
    nodes = calls(program.compiled.stages[f"backward_{stage}"].graph)
    return sum(op_name(node) in ("aten.addmm", "aten.softplus", "aten.tanh") for node in nodes)


@pytest.mark.broad
def test_the_rank_that_has_more_in_flight_recomputes_more() -> None:
    """Rank 0 has two microbatches between forward and backward, rank 1 one; so rank 1 recomputes nothing where rank 0 must."""
    plain = deep(None)
    first, second = (one.total for one in peak_memory.by_rank(plain.compiled))
    assert first > second and copies(plain, 0) == copies(plain, 1) == 0
    program = deep((first + second) // 2)
    assert copies(program, 0) > 0 and copies(program, 1) == 0
    lower = deep(first * 3 // 4)
    assert copies(lower, 0) > copies(program, 0) and max(one.total for one in peak_memory.by_rank(lower.compiled)) <= first * 3 // 4
    meshc.verify(lower)
    with pytest.raises(PlanError, match="a rank of the pipeline may hold 20,000 bytes"):
        deep(20000)


def test_what_fits_recomputes_nothing() -> None:
    plain = deep(None)
    assert str(deep(peak_memory.peak_rank(plain.compiled).total)) == str(plain)
