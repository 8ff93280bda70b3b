"""More axes than those of which every option is known: options around a plan, then around what is found."""

from __future__ import annotations

import pytest

from meshc.cost.devices import device
from meshc.passes.planner import plan_search as searching
from meshc.passes.planner.decision_options import OptionRules
from meshc.passes.planner.plan_search import PlanSearch
from meshc.passes.planner.search_space import Option
from tests.passes.planner.known import two

H100 = device("h100")
FOUR = "dp=2,dp_shard=4,cp=2,tp=4"


def opened(mesh: str) -> str:
    return "\n".join(f"{axis.partition('=')[0]}: auto" for axis in mesh.split(","))


def apart(one: Option, other: Option) -> set[str]:
    """The axes along which two options differ; an axis that stands elsewhere among those of its label does not, by itself."""
    places = [{axis: at for at, axes in enumerate(each.axes) for axis in axes} | dict.fromkeys(each.deferred, -1) for each in (one, other)]
    return {axis for axis in {*places[0], *places[1]} if places[0].get(axis) != places[1].get(axis)}


@pytest.mark.parametrize("ordered", [True, False])
def test_options_around_a_base_are_those_that_differ_along_one_axis(ordered: bool) -> None:
    mesh = (("a", 2), ("b", 4), ("c", 2), ("d", 4))
    legal = tuple((axis, (None, 0, 1)) for axis, _ in mesh)
    possible = OptionRules((64, 64), legal, (), (), mesh, defers=ordered, ordered=ordered)
    everything = possible.options()
    for base in everything[:: len(everything) // 7]:
        around = possible.options_around([base])
        assert base in around and set(around) <= set(everything)
        wanted = {one for one in everything if len(apart(one, base)) <= 1}
        assert set(around) <= wanted
        assert {frozenset(apart(one, base)) for one in around} == {frozenset(apart(one, base)) for one in wanted}
        if ordered:
            assert set(around) == wanted


@pytest.mark.broad
def test_four_axes_take_a_bounded_amount_of_work() -> None:
    """Counted, not timed: pairs of forms. All options would have millions for each value."""
    search = PlanSearch(two(1 << 16, 4096, 16384, FOUR, opened(FOUR)), H100)
    (found,) = search.find_choices()
    assert search.some and sum(len(group.lies) * len(group.wants) for group in search.model.groups) < 30_000
    assert found.certificate.near and str(found.certificate).endswith("options, of many axes those near it")
    assert found.certificate.gap < 1e-3
    again = search._options(found.pick)
    assert all(len(apart(option, again[key])) <= 1 for key, one in search.space.decisions.items() for option in one.options)
    tight = search.find_choices(0.9 * found.certificate.held)
    assert tight and tight[0].certificate.held <= 0.9 * found.certificate.held
    assert found.certificate.seconds <= tight[0].certificate.seconds
    assert search.find_choices()[0].options == found.options, "what a budget asked for is no part of the search"


@pytest.mark.parametrize("rows", [2048, 1 << 18])
def test_what_is_found_so_is_near_what_is_best(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = "dp=2,dp_shard=4,tp=4"
    (best,) = PlanSearch(two(rows, 4096, 16384, mesh, opened(mesh)), H100).find_choices()
    assert not best.certificate.near
    monkeypatch.setattr(searching, "ALL_OF", 2)
    (found,) = PlanSearch(two(rows, 4096, 16384, mesh, opened(mesh)), H100).find_choices()
    assert found.certificate.near
    assert best.certificate.seconds <= found.certificate.seconds * (1 + 1e-9)
    assert found.certificate.seconds <= best.certificate.seconds * 1.02
