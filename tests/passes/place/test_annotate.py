"""Annotate: the plan's words meet the model's factors; everything that does not fit is refused at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshc
from meshc.errors import PlanError
from tests.models import MLP


def compiled(plan: str, mesh: str = "dp=2,tp=2") -> meshc.Program:
    with torch.no_grad():
        return meshc.compile(MLP(8, 12, 6), meshc.Mesh(mesh), kwargs={"x": torch.zeros(4, 8)}, plan=plan)


def pins(program: meshc.Program) -> dict[str, dict[tuple[int, int], tuple[str, ...]]]:
    """What the pass has left of the plan's pins: by value, (dim, position) -> axes."""
    return {node.name: slots for (node, _), slots in program.lowered.placed.pins.values.items()}


def test_a_pin_becomes_axes_of_a_dim() -> None:
    program = compiled("dp: batch\ntp: ffn\npin up.weight: ffn/tp, _")
    assert {name: slots for name, slots in pins(program).items() if slots} == {"up_weight": {(0, 0): ("tp",)}}
    assert pins(compiled("dp: batch\ntp: ffn")) == {}


def test_a_factor_that_a_recipe_names_and_the_model_lacks_is_noted() -> None:
    notes = compiled("ddp+megatron").compiled.notes
    assert "tp: this model has no heads, so recipe megatron goes without it" in notes


def test_an_axis_larger_than_what_it_splits_is_noted() -> None:
    with torch.no_grad():
        program = meshc.compile(nn.Linear(8, 3, bias=False), meshc.Mesh("dp=8"), kwargs={"input": torch.zeros(4, 8)}, plan="dp: batch")
    (note,) = [note for note in program.compiled.notes if note.startswith("axis dp")]
    assert "4 of them hold nothing but padding" in note


def test_all_that_does_not_fit_is_refused_together() -> None:
    with pytest.raises(PlanError) as caught:
        compiled("dp: batsh\ntp: ffn\npin nowhere.weight: _, _")
    text = str(caught.value)
    assert "the model has no factor 'batsh'; did you mean batch" in text and "nowhere.weight" in text
