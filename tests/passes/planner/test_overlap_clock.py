"""A choice on a clock, by the model's numbers, against what the clock says of its program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshc.cost.devices import assume_device, device
from meshc.cost.program_clock import program_seconds
from meshc.passes import pipeline
from meshc.passes.driver import compile_program
from meshc.passes.pass_runner import run_pass
from meshc.passes.planner.overlap_clock import _LayerRepeat, _OverlapTimeline, _ReshardMessage, _run_timeline, overlapped_seconds
from meshc.passes.planner.plan_search import PlanSearch
from tests.passes.planner.known import two

H100 = device("h100")


def message(seconds: float, read: int) -> _ReshardMessage:
    return _ReshardMessage(seconds, 0.0, read, "forward", 1.0, 1)


def line(*computes: float) -> _OverlapTimeline:
    found = _OverlapTimeline()
    found.computes.update(enumerate(computes))
    return found


def test_what_is_read_later_travels_meanwhile() -> None:
    one = line(1, 1, 1)
    one.behind[0] = [message(2, read=2)]  # from 1 to 3; position 2 is reached at 2
    assert _run_timeline(one, [], H100) == 4
    one.behind[0] = [message(2, read=9)]
    assert _run_timeline(one, [], H100) == 3


def test_what_is_waited_for_stands_behind_what_is_not() -> None:
    one = line(1, 1, 1)
    one.behind[0] = [message(2, read=9)]
    one.starts[1] = [message(0.5, read=1)]  # starts at 1, and is there at 3.5
    assert _run_timeline(one, [], H100) == 5.5


def test_layers_that_were_not_captured_take_what_the_one_before_them_took() -> None:
    one = line(1, 2, 4)
    assert _run_timeline(one, [_LayerRepeat(start=1, seam=2, times=3)], H100) == 1 + 4 * 2 + 4
    one.behind[1] = [message(3, read=9)]  # the link is behind: 3 to 6, and three times more for each layer
    assert _run_timeline(one, [_LayerRepeat(start=1, seam=2, times=3)], H100) == 3 + (3 + 1 + 2) + 3 * (6 - 1)


def test_ranks_wait_for_the_last() -> None:
    uneven = replace(H100, uneven=0.5)
    one = line(1, 4, 4)
    one.behind[0], one.behind[1] = [message(2, read=1)], [message(2, read=2)]  # a half at 1, the root of 4 later a whole
    assert _run_timeline(one, [], uneven) == 1 + 2 + 0.5 + 4 + 2 + 1 + 4
    assert _run_timeline(one, [_LayerRepeat(start=1, seam=2, times=3)], uneven) == 1 + 4 * (2 + 0.5 + 4) + 2 + 1 + 4
    one.behind[0] = [message(2, read=2)]  # is there at 3.5, and the next at 7: both before they are read
    one.behind[1] = []
    assert _run_timeline(one, [], uneven) == 9


@pytest.mark.parametrize("plan", ["dp: batch\ntp: batch", "dp: batch\ntp: ffn", "dp: batch; store params, grads, state\ntp: ffn"])
def test_it_is_near_the_clock_of_the_program(plan: str) -> None:
    on = device("h100")
    given = two(1 << 16, 4096, 16384, "dp=2,tp=8", "dp: auto\ntp: auto")
    given = given.restart_for_request(replace(given.request, plan=plan))
    with assume_device(on):
        search = PlanSearch(run_pass(pipeline.PLACE[0], given), on, ())
        clock_s = program_seconds(compile_program._lower_or_unchunk(given, None).as_program(), on).total
    assert overlapped_seconds(search.plain, search.find_choices()[0].pick) == pytest.approx(clock_s, rel=0.1)
