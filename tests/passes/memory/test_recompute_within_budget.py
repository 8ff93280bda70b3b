"""A budget: as little is recomputed as keeps it, and what nothing keeps is refused with the least that would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx import Node

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.ir import calls, op_name, record
from meshc.passes.memory import recompute_within_budget as within
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt


def step_of(case: Case, mesh: str, budget: int | None, microbatches: int = 1, plan: str | None = None) -> meshc.Program:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, options=meshc.Options(memory_budget=budget))


def held(program: meshc.Program) -> int:
    return peak_memory.peak_rank(program.compiled).total


def copies(program: meshc.Program) -> list[Node]:
    """Calls of forward's operators that stand in backward."""
    (stage,) = program.compiled.stages.values()
    found = [node for node in calls(stage.graph) if record(node).phase == "backward"]
    return [node for node in found if op_name(node) in ("aten.addmm", "aten.softplus", "aten.tanh")]


def again(program: meshc.Program) -> int:
    """How many values are recomputed."""
    notes = [re.match(r"memory: .* makes (\d+) of forward's", note) for note in program.compiled.notes]
    return sum(int(note.group(1)) for note in notes if note is not None)


@pytest.mark.parametrize(
    "make, mesh, microbatches, share",
    [
        (nanogpt, "dp=2", 1, 0.75), broad(nanogpt, "dp_shard=2,tp=2", 1, 0.8), broad(nanogpt, "dp=2", 2, 0.9),
        broad(llama, "dp=2,tp=2", 1, 0.7), broad(gpt2, "tp=2", 2, 0.75), broad(gpt2, "dp=2,tp=2", 1, 0.85),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_a_budget_is_kept_and_the_step_means_what_it_means(make: Callable[..., Case], mesh: str, microbatches: int, share: float) -> None:
    budget = int(share * held(step_of(make(batch=16), mesh, None, microbatches)))
    program = step_of(make(batch=16), mesh, budget, microbatches)
    assert held(program) <= budget and [note for note in program.compiled.notes if note.startswith("memory: ")]
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}


def deep(budget: int | None, lines: str = "") -> meshc.Program:
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 16), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(*layers)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss)
    inputs = {"target": torch.zeros(256, 16)}
    options = meshc.Options(memory_budget=budget)
    return meshc.compile(step, meshc.Mesh("dp=2"), args=(torch.zeros(256, 16),), kwargs=inputs, plan=f"dp: batch\n{lines}", options=options)


@pytest.mark.parametrize("overhead", [0.0, 0.08, 0.4, 0.7])
def test_rounds_end_near_the_most_that_may_be_kept(overhead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values come in pieces, and what recomputes them takes memory: a round may ask for less, and get what it had."""
    piece, whole = 50, 1000

    class Pieces:
        def __init__(self, *_: object) -> None:
            self.keep_all, self.keep_least = SimpleNamespace(bytes=whole), SimpleNamespace(bytes=0)

        def within(self, most: int) -> tuple[SimpleNamespace, float]:
            return SimpleNamespace(bytes=most // piece * piece, again=(), there=(), seconds=0.0), 0.0

    def held(kept: int) -> int:
        return round(kept + overhead * (whole - kept))

    def with_copies(lowered: object, *_: object) -> object:
        return lowered

    def note(kept: SimpleNamespace, *_: object) -> int:
        return int(kept.bytes)

    def lowered(kept: int) -> SimpleNamespace:
        made = SimpleNamespace(kept=kept, mesh=None, request=None, stages={"": None})
        made.with_notes = lowered
        return made

    monkeypatch.setattr(within, "Trade", Pieces)
    monkeypatch.setattr(within, "with_copies", with_copies)
    monkeypatch.setattr(within, "recompute_note", note)
    monkeypatch.setattr(within, "held_bytes", lambda made: held(made.kept))
    for name, value in (("recomputable_of_stage", SimpleNamespace(backward=())), ("recompute_seconds", {}), ("host_budget_of", None)):
        monkeypatch.setattr(within, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(within, "devices_of", lambda mesh: SimpleNamespace(slowest=lambda: None))
    for budget in range(held(0), whole, 7):
        found = within.recompute_within_budget(lowered(whole), budget, ()).kept  # type: ignore[arg-type, attr-defined]
        best = max(kept for kept in range(0, whole + 1, piece) if held(kept) <= budget)
        assert held(found) <= budget and found >= best - (2 * piece if overhead < 0.7 else best / 2 + piece)


@pytest.mark.broad
def test_the_less_a_rank_may_hold_the_more_is_recomputed_until_nothing_fits() -> None:
    plain = deep(None)
    whole = held(plain)
    assert str(deep(whole)) == str(plain)
    counts = []
    for percent in (95, 85, 75):
        program = deep(whole * percent // 100)
        assert held(program) <= whole * percent // 100
        counts.append(again(program))
    assert 0 < counts[0] < counts[1] < counts[2]
    with pytest.raises(PlanError, match="a rank may hold 5,000 bytes .Options.memory_budget=5000.., but by this plan it holds ") as caught:
        deep(5000)
    least = int(re.search(r"by this plan it holds ([\d,]+):", str(caught.value))[1].replace(",", ""))  # type: ignore[index]
    assert "what to do: " in str(caught.value) and f"Options(memory_budget={least})" in str(caught.value)
    assert held(deep(least)) == least


def test_what_a_plan_says_stands() -> None:
    """Of the layers that its lines are about, none is recomputed for a budget."""
    budget = held(deep(None)) * 90 // 100
    program = deep(budget, "remat [0-2]: none")
    made = {record(node).source.module.split(".")[0] for node in copies(program)}
    assert held(program) <= budget and made and made <= {"3", "4", "5"}
