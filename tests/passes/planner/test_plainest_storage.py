"""Ties: of storage that costs the same the plainest, whatever a relaxation took of it."""

from __future__ import annotations

from meshc.cost.devices import find_device
from meshc.passes.planner.plan_search import PlanSearch, plainest
from meshc.passes.planner.search_space import Key
from tests.passes.planner.known import two


def test_of_storage_that_costs_the_same_the_plainest_is_taken() -> None:
    search = PlanSearch(two(65536, 2048, 8192, "dp=2,tp=2", "dp: auto\ntp: auto"), find_device("h100"))
    model, pick = search.model, search.find_choices()[0].pick
    key: Key = ("state", "down.weight")
    number = search.folded.of[key]
    options = model.decision(number).options
    assert options[pick[number]].axes == (("dp", "tp"), ())
    others = [(*pick[:number], option, *pick[number + 1 :]) for option in range(len(options)) if option != pick[number]]
    equal = [one for one in others if abs(model.seconds(one) - model.seconds(pick)) < 1e-12]
    assert {options[one[number]].axes for one in equal} >= {(("tp", "dp"), ()), ((), ("dp", "tp")), ((), ("tp", "dp"))}
    assert {plainest(search.weighed, one) for one in equal} == {pick}
    dear = max(others, key=model.seconds)
    assert model.seconds(plainest(search.weighed, dear)) <= model.seconds(dear)
