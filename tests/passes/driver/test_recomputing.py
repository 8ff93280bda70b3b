"""A search within a budget, of programs that recompute values to keep it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import device
from meshc.cost.program_clock import program_seconds
from meshc.errors import PlanError
from meshc.passes.planner.plan_search import PlanSearch
from tests.broad import broad
from tests.models import Case, llama, nanogpt
from tests.passes.planner.known import step


def deep(blocks: int = 1) -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Softplus(), nn.Linear(64, 16), nn.Tanh()) for _ in range(blocks)))
    return Case("deep", model, {"input": torch.randn(256, 16)}, nn.functional.mse_loss, {"target": torch.randn(256, 16)})


def step_of(case: Case, mesh: str, plan: str, budget: int | None, remat: str | None = None) -> meshc.Program:
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=case.loss)
    options = meshc.Options(memory_budget=budget, remat=remat)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, options=options)


def seconds_of(program: meshc.Program) -> float:
    return float(program_seconds(program.compiled).total)


@pytest.mark.parametrize(
    "make, mesh, share", [(deep, "dp=2", 0.55), broad(nanogpt, "dp=2,tp=2", 0.5), broad(llama, "dp=4", 0.6)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_fits_only_by_recomputing_values_is_found_and_has_a_text(make: Callable[[], Case], mesh: str, share: float) -> None:
    """A plan of its text gives the same program."""
    budget = int(share * peak_memory.peak_rank(step_of(make(), mesh, "auto", None).compiled).total)
    program = step_of(make(), mesh, "auto", budget)
    assert peak_memory.peak_rank(program.compiled).total <= budget
    assert any(note.startswith("memory: ") for note in program.compiled.notes)
    assert str(step_of(make(), mesh, str(program.plan), budget)) == str(program)
    meshc.verify(program, dtype=torch.float64)


@pytest.mark.parametrize("part", (0.25, 0.5))
def test_a_part_of_what_may_be_recomputed_counts_with_its_bytes_and_its_seconds(part: float) -> None:
    """Of two layers: of each its first product and what that goes through, which no other layer reads, and what the loss adds up."""
    search = PlanSearch(step(deep(2).model, {"input": torch.randn(256, 16)}, "dp=2", "dp: auto", torch.sum), device("h100"))
    (free,) = search.find_choices()
    again, fewest = search.with_recompute(part), search.with_recompute()
    walks = [one.memory.walk(free.pick) for one in (search, again, fewest)]
    np.testing.assert_allclose(walks[1], (1 - part) * walks[0] + part * walks[2])
    assert walks[2].max() < walks[1].max() < walks[0].max()
    assert fewest.model.seconds(free.pick) == search.model.seconds(free.pick)
    made = {node.name: search.model.operators.seconds(node, {token: at for at, token in enumerate(one.labels)}, one.options)[option]
            for node, one in search.space.decisions.items() if not isinstance(node, tuple) and node.op == "call_function"
            for option in [free.pick[search.folded.of[node]]]}  # fmt: skip
    recomputed = sum(made[name] for name in ("addmm", "softplus", "addmm_2", "softplus_1", "sum_1"))
    assert again.model.seconds(free.pick) == pytest.approx(search.model.seconds(free.pick) + part * recomputed) and recomputed > 0


@pytest.mark.parametrize("share, parts", [(0.6, [1.0, 0.25]), (0.5, [1.0, 0.25, 0.5])])
def test_the_least_part_that_leads_to_a_choice_is_searched(share: float, parts: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = peak_memory.peak_rank(step_of(deep(2), "dp=2", "auto", None).compiled).total
    searched, real = list[float](), PlanSearch.with_recompute

    def noted(search: PlanSearch, part: float = 1.0) -> PlanSearch:
        searched.append(part)
        return real(search, part)

    monkeypatch.setattr(PlanSearch, "with_recompute", noted)
    program = step_of(deep(2), "dp=2", "auto", int(share * whole))
    assert searched == parts and peak_memory.peak_rank(program.compiled).total <= share * whole


@pytest.mark.broad
def test_nothing_that_keeps_everything_holds_so_little() -> None:
    """As `what_fits_only_by_making_values_again` says of the first of its budgets."""
    whole = peak_memory.peak_rank(step_of(deep(), "dp=2", "auto", None).compiled).total
    with pytest.raises(PlanError, match="keeps a rank within"):
        step_of(deep(), "dp=2", "auto", int(0.55 * whole), remat="none")


@pytest.mark.broad
def test_what_is_found_is_never_slower_than_a_recipe_that_recomputes_values() -> None:
    """The clock knows what recomputing values takes, and estimates do not: by these alone no recipe is left out."""
    make, mesh = nanogpt, "dp=2,tp=2"
    budget = int(0.5 * peak_memory.peak_rank(step_of(make(), mesh, "auto", None).compiled).total)
    taken = seconds_of(step_of(make(), mesh, "auto", budget))
    others = list[float]()
    for recipe in ("ddp", "zero1", "fsdp", "megatron", "megatron_sp", "fsdp+megatron", "fsdp+megatron_sp"):
        with suppress(PlanError):  # it does not fit, or is about an axis that is not there
            others.append(seconds_of(step_of(make(), mesh, recipe, budget)))
    assert others and taken <= min(others)
