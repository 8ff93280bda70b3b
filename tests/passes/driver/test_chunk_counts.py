"""A budget that is kept in chunks of the head where these take less than recomputing values does, by the clock."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.cost import peak_memory
from meshc.cost.program_clock import program_seconds
from meshc.errors import PlanError
from meshc.passes.driver import within_budget
from meshc.passes.driver.chunk_counts import may_fit


class Deep(nn.Module):
    """Layers that take long to be recomputed, and a head that makes much of little."""

    def __init__(self, words: int, hidden: int = 128) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.Softplus(), nn.Linear(4 * hidden, hidden)) for _ in range(4)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(hidden, words)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def step(plan: str = "", mesh: str = "dp=2", words: int = 1024, microbatches: int | None = 1, **options: Any) -> meshc.Program:
    torch.manual_seed(0)
    model = Deep(words)
    made = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=cross_entropy, microbatches=microbatches)
    inputs = {"args": (torch.randn(16, 64, 128),), "kwargs": {"target": torch.randint(words, (16, 64))}}
    lines = f"dp: batch\n{plan}" if "dp" in mesh else plan
    return meshc.compile(made, meshc.Mesh(mesh), plan=lines, options=meshc.Options(**options), **inputs)


def held(program: meshc.Program) -> int:
    return peak_memory.peak_rank(program.compiled).total


def seconds(program: meshc.Program) -> float:
    return program_seconds(program.compiled).total


def chunks(program: meshc.Program) -> int:
    """Into which the head has gone for the budget."""
    found = [re.search(r"the head and loss run in (\d+) chunks", note) for note in program.compiled.notes]
    return next((int(one[1]) for one in found if one is not None), 1)


def test_as_many_chunks_as_take_least_by_the_clock() -> None:
    """Of a budget with room for half of the logits two, although recomputing values keeps it too; of a smaller one eight."""
    whole = held(step(remat="none"))
    assert chunks(step(memory_budget=whole)) == 1
    for percent, wanted, others in ((80, 2, (1, 8)), (60, 8, (32,))):
        budget = whole * percent // 100
        program = step(memory_budget=budget)
        assert held(program) <= budget and chunks(program) == wanted, (percent, program.compiled.notes)
        for count in others:
            other = step(f"chunk head: {count}", memory_budget=budget)
            assert held(other) <= budget and seconds(program) < seconds(other), (percent, count)
        same = step(f"chunk head: {wanted}", memory_budget=budget)
        assert str(program)[str(program).index("def ") :] == (text := str(same))[text.index("def ") :]


def test_what_a_plan_says_of_the_head_stands() -> None:
    budget = held(step(remat="none")) * 80 // 100
    for count in (1, 8):
        program = step(f"chunk head: {count}", memory_budget=budget)
        assert held(program) <= budget and chunks(program) == 1


def test_a_small_head_is_not_tried() -> None:
    """Chunks of it could leave room for hardly anything."""
    budget = held(step(words=128, remat="none")) * 75 // 100
    program = step(words=128, memory_budget=budget)
    assert held(program) <= budget and chunks(program) == 1


def test_chunks_of_what_is_not_too_much_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the model and its state take: however few logits there are at once, that is not kept."""
    asked, in_rounds = [], within_budget._RequestSearch.lower_in_rounds

    def noted(self: Any, request: Any) -> Any:
        asked.append(request.chunks)
        return in_rounds(self, request)

    monkeypatch.setattr(within_budget._RequestSearch, "lower_in_rounds", noted)
    kept = sum(peak_memory.peak_rank(step(words=128, remat="none").compiled).kept.values())
    asked.clear()
    with pytest.raises(PlanError, match="a rank may hold"):
        step(words=128, memory_budget=kept // 2)
    assert set(asked) == {None}, asked


def test_more_chunks_are_tried_while_their_logits_may_be_what_is_too_much() -> None:
    """Of logits of 800 bytes chunks save 4,800 at most; where 8 chunks have saved 700 bytes, of 8 parts, all others save 100 more."""

    assert [may_fit(1, spare, None, 800) for spare in (-4800, -4801)] == [True, False]
    assert [may_fit(8, spare, spare - 700, 800) for spare in (-100, -101)] == [True, False]
    assert not may_fit(8, -300, -300, 800)


@pytest.mark.broad
def test_it_means_what_the_model_does_and_is_verified_as_it_was_chosen() -> None:
    program = step(memory_budget=held(step(remat="none")) * 80 // 100)
    assert chunks(program) == 2
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}


@pytest.mark.broad
def test_over_a_pipeline_the_last_stage_runs_in_chunks() -> None:
    """Its gradients add up chunk by chunk, and then microbatch by microbatch: there is one sum of each, and not one for each chunk."""
    options = {"mesh": "pp=2", "microbatches": 4, "schedule": "1f1b", "pp_splits": ["layers.2"], "words": 2048}
    plain, chunked = step(remat="none", **options), step("chunk head: 8", remat="none", **options)
    last = [peak_memory.by_rank(program.compiled)[1] for program in (plain, chunked)]
    assert last[0].total - last[1].total > 7 / 8 * 2 * (256 * 2048 * 4)  # of two values like a microbatch's logits an eighth at a time
    assert last[0].peak.gradients == last[1].peak.gradients
    budget = (last[0].total + last[1].total) // 2
    program = step(memory_budget=budget, **options)
    assert held(program) <= budget and chunks(program) > 1
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}
