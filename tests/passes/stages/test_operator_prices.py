"""Prices: stages are balanced by what the clock plays of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshc
from meshc.cost.pipeline_costs import costs_of
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.stages import cut_stages
from meshc.passes.stages.cut_stages import UncutProgram
from meshc.passes.stages.pipeline_shape import PipelineShape
from meshc.pipelining.timing import Costs
from tests.broad import broad
from tests.models import Case, gpt2, nanogpt


def cut(
    monkeypatch: pytest.MonkeyPatch, case: Case, mesh: str, count: int, **options: Any
) -> tuple[UncutProgram, PipelineShape, LoweredProgram]:
    """What a compilation cuts, in which shape, and what comes of it."""
    seen: list[tuple[UncutProgram, PipelineShape, LoweredProgram]] = []
    whole = UncutProgram.cut

    def noted(uncut: UncutProgram, shape: PipelineShape) -> LoweredProgram:
        made = whole(uncut, shape)
        seen.append((uncut, shape, made))
        return made

    with monkeypatch.context() as patch:
        patch.setattr(cut_stages.UncutProgram, "cut", noted)
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-3)
        step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=count)
        meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, options=meshc.Options(**options))
    return seen[-1]


def clock(lowered: LoweredProgram) -> Costs:
    assert lowered.pipeline is not None
    return costs_of(lowered.pipeline, lowered.stages, lowered.mesh)


@pytest.mark.parametrize("schedule", [broad("1f1b"), "zb_h1"])
def test_what_stages_are_balanced_by_is_what_the_clock_plays_of_the_cut_program(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    uncut, shape, made = cut(monkeypatch, nanogpt(batch=4, layers=3, tied=False), "pp=2", 4, schedule=schedule)
    estimated, played = uncut.work.costs(shape.cuts).seconds, clock(made).seconds
    assert {op: estimated[op] for op in played} == pytest.approx(played, rel=1e-9)


@pytest.mark.broad
def test_another_number_of_microbatches_is_priced_as_it_would_be_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tied table, dropout, and gradients that do not grow with the rows of a microbatch."""
    uncut, shape, _ = cut(monkeypatch, gpt2(batch=8), "pp=2", 2, schedule="1f1b")
    other, _, _ = cut(monkeypatch, gpt2(batch=8), "pp=2", 8, schedule="1f1b")
    request = other.lowered.request
    (estimated, seconds), *_ = uncut.estimate_shapes(request).can
    (lowered, played), *_ = other.shapes.can
    assert estimated.cuts == lowered.cuts and estimated.microbatches == 8
    assert seconds == pytest.approx(played, rel=0.01)
    assert uncut.work.costs(shape.cuts).seconds != other.work.costs(shape.cuts).seconds
