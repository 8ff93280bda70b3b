"""A schedule that is played under many costs takes under each what a simulation of it takes, to the last bit."""

from __future__ import annotations

import random

import pytest

from meshc.errors import ScheduleError
from meshc.passes.stages import schedules
from meshc.pipelining.schedule import Schedule, chain, parse
from meshc.pipelining.timing import Costs, ScheduleReplay, simulate


def drawn(chance: random.Random, stages: int) -> Costs:
    """Costs of stages and links that are not alike; of some links none."""
    seconds = {(op, stage): chance.uniform(0.1, 2.0) for op in "FIW" for stage in range(stages)}
    return Costs(seconds, {link: chance.choice((0.0, chance.uniform(0.0, 1.0))) for link in sorted(chain(stages))})


@pytest.mark.parametrize("name", schedules.names())
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 3), (3, 2), (4, 8)])
def test_it_takes_what_a_simulation_takes(name: str, ranks: int, microbatches: int) -> None:
    kind, chance = schedules.get(name), random.Random(f"{name} {ranks} {microbatches}")
    stages = kind.stages(ranks)
    schedule = schedules.build(kind, ranks, microbatches)
    played = ScheduleReplay(schedule)
    for _ in range(3):
        costs = drawn(chance, stages)
        assert played.makespan_s(costs) == simulate(schedule, costs).makespan_s > 0.0


@pytest.mark.parametrize("name", [name for name in schedules.names() if not schedules.get(name).by_costs])
def test_lists_that_go_by_no_costs_are_the_same_under_any(name: str) -> None:
    kind, chance = schedules.get(name), random.Random(name)
    for ranks, microbatches in ((2, 1), (2, 5), (4, 3), (4, 16)):
        stages = kind.stages(ranks)
        lists = kind.lists(ranks, stages, microbatches, None)
        assert all(kind.lists(ranks, stages, microbatches, drawn(chance, stages)) == lists for _ in range(3))


def test_what_never_ends_is_refused_as_a_simulation_refuses_it() -> None:
    stuck = parse("0: RECV:B1.0>0 B0.0 F0.0 SEND:F0.0>1\n1: RECV:F0.0>1 F1.0 B1.0 SEND:B1.0>0")
    said = "the schedule stops before its end: rank 0 at B0.0, rank 1 at F1.0"
    with pytest.raises(ScheduleError, match=said):
        simulate(stuck, drawn(random.Random(0), 2))
    with pytest.raises(ScheduleError, match=said):
        ScheduleReplay(stuck)


def test_a_schedule_of_nothing_takes_no_time() -> None:
    assert ScheduleReplay(Schedule(((), ()))).makespan_s(Costs({})) == 0.0
