"""`Experts(bound=)`: as without one where there are places for what is chosen; an error names the experts where there are not."""

from __future__ import annotations

import pytest
import torch

import meshc
from meshc.cost import peak_memory
from meshc.ops.bounded_groups import bounded_choices, from_places, to_places
from tests.models import Case
from tests.zoo.experts import shallow


def trained(found: Case, mesh: str, bound: float | None) -> meshc.Program:
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(found.model, optimizer=optimizer, loss=lambda output: output.loss)
    return meshc.compile(step, meshc.Mesh(mesh), options=meshc.Options(experts=meshc.Experts(bound=bound)), kwargs=found.call_kwargs)


@pytest.mark.broad
def test_a_rank_holds_less() -> None:
    """Of four experts one a rank, two a token: the worst case is twice what falls to each. Beside parameters and state, which are alike."""
    worst, bounded = (peak_memory.peak_rank(trained(shallow("mixtral"), "ep=4", bound).compiled) for bound in (None, 1.0))
    assert bounded.kept == worst.kept
    assert bounded.peak.total < 0.75 * worst.peak.total


def test_what_has_no_place_is_refused_with_the_layer_and_the_expert() -> None:
    found = trained(shallow("mixtral"), "ep=4", 1.0)
    said = r"model\.layers\.0\.mlp\.experts: experts \d to \d are chosen \d+ times in row \d of the batch \(expert \d alone \d+ times\)"
    with pytest.raises(meshc.InputError, match=said) as raised:
        meshc.verify(found, dtype=torch.float64)
    assert "and have 6 places there" in str(raised.value) and "a higher Options(experts=Experts(bound=))" in str(raised.value)


def test_places_are_taken_from_the_front_by_expert() -> None:
    choice = torch.tensor([[[3, 0], [1, 2], [0, 3]]])
    expert, place = bounded_choices(choice, 2, 2, 4, 0, 2, "")
    assert expert.tolist() == [[[0, 0, 1, -1]], [[0, 1, 1, -1]]]
    assert place.tolist() == [[[1, 4, 2, -1]], [[3, 0, 5, -1]]]
    rows = to_places(torch.tensor([[[1.0], [2.0], [3.0]]]), place, 2)
    assert rows[:, 0, :, 0].tolist() == [[1.0, 3.0, 2.0, 0.0], [2.0, 1.0, 3.0, 0.0]]
    assert from_places(rows, place, 3, 2)[0, :, 0].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize("bound", [0, -1.5])
def test_a_bound_of_nothing_is_refused(bound: float) -> None:
    with pytest.raises(meshc.PlanError, match=r"Options\(experts=Experts\(bound=.*\)\): a number above 0, such as 1.5, or None"):
        meshc.Options(experts=meshc.Experts(bound=bound))
