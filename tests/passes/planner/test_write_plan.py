"""A found plan is text: compiled without a search, it gives the program that the search gave; and it is short."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import meshc
from meshc.cost import peak_memory
from meshc.optimizer.optimizer import describe
from meshc.passes import pipeline
from meshc.passes.driver import compile_program
from meshc.passes.driver.compile_program import finish
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.assignment import Assignment
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.assign import assign
from meshc.passes.planner.build_space import build_space
from meshc.passes.planner.fold import fold
from meshc.passes.planner.plan_search import axis_choices
from meshc.passes.planner.write_plan import difference, write_plan
from meshc.plan.entries import AxisEntry
from meshc.plan.plan import Plan, open_axes
from meshc.program.program import PlainProgram
from meshc.text.printer import hash_program, print_program
from tests import models
from tests.broad import broad
from tests.captured import Captured

BOTH = "dp: auto\ntp: auto"


def t5() -> models.Case:
    torch.manual_seed(0)
    sizes = dict(d_model=32, d_kv=8, d_ff=64, num_heads=4, vocab_size=64, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(T5Config(num_layers=2, num_decoder_layers=2, **sizes))
    ids = torch.randint(0, 64, (6, 12))
    return models.Case("t5", model, {"input_ids": ids, "labels": ids})


CASES = {"mlp": lambda: models.mlp(batch=512, width=512), "llama": models.llama, "gpt2": models.gpt2, "t5": t5}


@cache
def captured(kind: str) -> Captured:
    return Captured(CASES[kind](), train=True, double=False)


def program(kind: str, mesh: str, plan: str, **changes: Any) -> PlainProgram:
    one = captured(kind)
    ask: dict[str, Any] = dict(optimizer=describe(torch.optim.AdamW(one.reference.module.parameters())), clip_grad_norm=1.0)
    return one.program(mesh, plan, **(ask | changes))


def written(kind: str, mesh: str, plan: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Plan:
    """What is found for this plan, once its text has given the same program without a search."""
    found = program(kind, mesh, plan, **changes)
    text = str(found.plan)
    assert "auto" not in text and Plan(text) == found.plan, found.notes
    with monkeypatch.context() as patched:
        patched.setattr("meshc.passes.driver.choose.PlanSearch", None)
        again = program(kind, mesh, text, **changes)
    assert hash_program(again) == hash_program(found)
    assert print_program(again) == print_program(found), "comments too"
    assert [note for note in found.notes if "searched;" not in note] == again.notes
    return found.plan


# ------------------------------------------------------------------------------------------------------------- whatever was chosen


def drawn(kind: str, mesh: str, plan: str, seed: int) -> PlacedModel:
    """Placed by choices that are drawn, each operator's and each parameter's for itself; equal layers alike."""
    one = captured(kind)
    optimizer = describe(torch.optim.AdamW(one.reference.module.parameters()))
    request = replace(one.request, mesh=meshc.Mesh(mesh), plan=plan, optimizer=optimizer, clip_grad_norm=1.0)
    placed = compile_program.update_and_factorize(one.traced.copy_for_request(request))
    ready = run_pass(pipeline.PLACE[0], placed)
    axes = open_axes(placed.plan)
    space = build_space(ready, axes, _baseline(ready, axes))
    folded = fold(space)
    draw = random.Random(seed)
    pick = [draw.randrange(len(space.decisions[members[0]].options)) for members in folded.members]
    return replace(placed, choices=axis_choices(ready, space, folded, pick))


def _baseline(placed: PlacedModel, axes: tuple[str, ...]) -> Assignment | None:
    kept = [entry for entry in placed.plan.axes if entry.axis not in axes]
    return assign(replace(placed, plan=placed.plan.having([*kept, *map(AxisEntry, axes)]))).require_assignment() if kept else None


@pytest.mark.parametrize(
    ("kind", "mesh", "plan"),
    [
        ("mlp", "dp=2,tp=2", BOTH),
        ("mlp", "dp=2,tp=2", "dp: batch; store state\npin op:*/backward: -/tp\ntp: auto"),
        broad("mlp", "dp=2,tp=2,cp=2", f"{BOTH}\ncp: auto"),
        broad("llama", "dp=2,tp=2", BOTH),
        broad("llama", "dp=2,tp=2,cp=2", f"{BOTH}\ncp: auto"),
        broad("gpt2", "dp=2,tp=2", BOTH),
        broad("t5", "dp=2,tp=2", BOTH),
        broad("t5", "dp=2,tp=2", "dp: batch; store state\ntp: auto"),
    ],
)
@pytest.mark.parametrize("seed", [0, broad(1)])
def test_whatever_is_chosen_has_a_text(kind: str, mesh: str, plan: str, seed: int) -> None:
    placed = drawn(kind, mesh, plan, seed)
    decided = run_passes(pipeline.PLACE, placed)
    text = write_plan(decided, open_axes(placed.plan))
    assert not difference(replace(decided, plan=text))
    said = placed.with_request(replace(placed.request, plan=str(text)))
    by_choices, by_text = (finish(compile_program.lower_by_plan(one)) for one in (said, replace(said, choices=None)))
    assert print_program(by_text) == print_program(by_choices)


def test_what_no_pin_may_tell_is_left_and_found_by_comparing(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = run_passes(pipeline.PLACE, drawn("mlp", "dp=2,tp=2", BOTH, 0))
    assert write_plan(decided, ("dp", "tp")).operators
    monkeypatch.setattr("meshc.passes.planner.choose_pins.directive_of_pin", lambda *_: "a pin may not split it so")
    plan = write_plan(decided, ("dp", "tp"))
    assert not plan.operators and difference(replace(decided, plan=plan))


# --------------------------------------------------------------------------------------------------------------- what is searched for


@pytest.mark.parametrize(
    ("kind", "plan"),
    [("mlp", BOTH), ("mlp", "dp: batch\ntp: auto"), broad("llama", BOTH), broad("gpt2", BOTH), broad("gpt2", "dp: batch\ntp: auto"),
     broad("t5", BOTH)],
)  # fmt: skip
def test_what_is_found_compiles_to_the_same_program(kind: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written(kind, "dp=2,tp=2", plan, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "mesh", "plan", "count"),
    [
        broad("mlp", "dp=2,tp=2", BOTH, 2),
        broad("mlp", "pp=2,dp=2", "dp: auto", 4),
        broad("llama", "dp=2,tp=2", BOTH, 2),
        broad("llama", "pp=2,dp=2,tp=2", BOTH, None),
        broad("gpt2", "pp=2,dp=2", "dp: auto", 2),
    ],
)
def test_so_does_what_is_found_for_microbatches_and_stages(
    kind: str, mesh: str, plan: str, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    written(kind, mesh, plan, monkeypatch, microbatches=count)


def test_a_text_that_is_edited_is_read_as_any_plan() -> None:
    """Lines may go, and the rest compiles; a slip is refused by its line."""
    text = str(program("mlp", "dp=2,tp=2", "dp: batch; store state\ntp: auto").plan)
    lines = text.splitlines()
    fewer = [line for line in lines if not line.startswith("store down.")]
    assert str(program("mlp", "dp=2,tp=2", "\n".join(fewer)).plan).splitlines() == fewer
    slips = {
        "store up.wieght: ffn/tp, _": "no parameter is called 'up.wieght'; did you mean up.weight",
        "store up.weight ffn/tp, _": "^ after the pattern comes a colon: `store up.weight: ffn/tp, _`",
        "store up.weight: ffn/tp, _\nstore up.weight: _, hidden/tp": "tp splits ffn in dim 0 and hidden in dim 1; an axis splits",
        "pin op:midle/forward: batch/tp": "no operator is called 'midle/forward'; did you mean middle/forward",
        "pin op:up/forward: batch/tp\npin op:up: -/tp": "in up/forward/addmm tp splits batch in one and nothing in the other; keep one",
    }
    for slip, said in slips.items():
        with pytest.raises(meshc.PlanError) as caught:
            program("mlp", "dp=2,tp=2", f"{text}\n{slip}")
        assert f"line {len(lines) + 1}" in str(caught.value) and said in str(caught.value), slip


@pytest.mark.broad
def test_what_is_found_within_a_budget_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    free = program("mlp", "dp=4", "dp: auto")
    budget = int(0.9 * peak_memory.peak_rank(free).total)
    plan = written("mlp", "dp=4", "dp: auto", monkeypatch, memory_budget=budget, remat="none")
    assert plan != free.plan and peak_memory.peak_rank(program("mlp", "dp=4", str(plan))).total <= budget
