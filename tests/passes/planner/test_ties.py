"""Ties: storage that costs the same is as plain as it may be, and costs no more for it."""

from __future__ import annotations

from meshc.cost.devices import named
from meshc.passes.planner.search import Search
from meshc.passes.planner.ties import plainest
from tests.passes.planner.known import two


def test_of_storage_that_costs_the_same_the_plainest_is_taken() -> None:
    search = Search(two(4096, 512, 2048, "dp=2,tp=2", "dp: auto\ntp: auto"), named("h100"))
    (found,) = search.found()
    states = [
        number for number in range(len(found.pick))
        if isinstance(key := search.model.decision(number).key, tuple) and key[0] == "state"
    ]  # fmt: skip
    others = 0
    for number in states:
        for option in range(len(search.model.decision(number).options)):
            one = (*found.pick[:number], option, *found.pick[number + 1 :])
            if one != found.pick and search.model.seconds(one) == search.model.seconds(found.pick):
                others += search.memory.walk(one).max() >= search.memory.walk(found.pick).max()
                plain = plainest(search.model, search.memory, one)
                assert plain == found.pick or search.memory.walk(one).max() < search.memory.walk(found.pick).max()
    assert others, "there is something to choose from"
    assert plainest(search.model, search.memory, found.pick) == found.pick, "nothing is plainer than what is taken"
