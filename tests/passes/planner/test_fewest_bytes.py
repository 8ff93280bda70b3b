"""The fewest bytes that a choice can hold: of small problems, by going through all choices; on three axes, by its bound."""

from __future__ import annotations

import pytest

from meshc.cost.devices import device
from meshc.passes.planner import plan_search as searching
from meshc.passes.planner.budget_search import find_fewest_bytes
from meshc.passes.planner.plan_search import PlanSearch
from tests.broad import broad
from tests.passes.planner.drawn import GIGA, choices, drawn
from tests.passes.planner.known import two
from tests.passes.planner.test_solver import fullest


@pytest.mark.parametrize("seed", [seed if seed < 8 else broad(seed) for seed in range(20)])
def test_nothing_holds_less_than_what_is_found(seed: int) -> None:
    model, memory = drawn(seed, classes=4)
    first = tuple(0 for _ in model.own)
    found = find_fewest_bytes(model, memory, [first])
    fewest = min(fullest(memory, pick) for pick in choices(model))
    assert found.held_bytes == fullest(memory, found.best) == pytest.approx(fewest, rel=1e-3)
    assert found.bound <= fewest + GIGA * 1e-9


def test_the_fewest_are_looked_for_once_whatever_the_budget_and_what_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values are recomputed, others are the fewest."""
    asked = []
    monkeypatch.setattr(searching, "find_fewest_bytes", lambda *given: asked.append(given) or find_fewest_bytes(*given))
    search = PlanSearch(two(1 << 10, 512, 2048, "dp=2,tp=2", "dp: auto\ntp: auto"), device("h100"))
    assert [search.find_choices(1000.0), search.find_choices(2000.0), search.with_overlap().find_choices(1000.0)] == [[], [], []] and len(
        asked
    ) == 1
    assert search.smallest is not None and search.smallest.certificate.held == search.least
    again = search.with_recompute()
    assert again.find_choices(1000.0) == [] and len(asked) == 2


@pytest.mark.broad
def test_what_is_named_on_three_axes_is_held_by_a_choice_and_nothing_holds_a_tenth_less() -> None:
    mesh = "dp=2,dp_shard=2,tp=2"
    search = PlanSearch(two(1 << 10, 512, 2048, mesh, "dp: auto\ndp_shard: auto\ntp: auto"), device("h100"))
    (free,) = search.find_choices()
    assert search.find_choices(1000.0) == []
    fewest = search.least
    found = find_fewest_bytes(search.model, search.memory, [free.pick])
    assert fewest == search.held_bytes(found.best) < free.certificate.held
    assert 0.9 * fewest < found.bound <= fewest
    assert search.find_choices(0.9 * fewest) == [] and search.least == fewest
