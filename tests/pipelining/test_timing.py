"""Playing a schedule by hand-made costs: when things start, what messages take, what is held meanwhile."""

from __future__ import annotations

import pytest

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import Action, Recv, Schedule, Send, StageLink, parse
from meshc.pipelining.timing import Costs, equal_costs, simulate

TWO = parse("0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1")


def times(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, float]]:
    return {str(event.instruction): (event.start_s, event.end_s) for event in simulate(schedule, costs).events}


def test_equal_stages_and_messages_that_take_nothing() -> None:
    timeline = simulate(TWO, equal_costs(2))
    assert {str(e.instruction): (e.start_s, e.end_s) for events in timeline.action_events for e in events} == {
        "F0.0": (0, 1),
        "F0.1": (1, 2),
        "F1.0": (1, 2),
        "B1.0": (2, 4),
        "F1.1": (4, 5),
        "B0.0": (4, 6),
        "B1.1": (5, 7),
        "B0.1": (7, 9),
    }
    assert timeline.makespan_s == 9
    assert repr(timeline) == "<Timeline of a schedule: 2 ranks, 16 events, 9 s>"
    assert timeline.idle_s == (3, 3)
    assert timeline.bubble == 6 / 18
    assert timeline.peaks() == (2, 1)
    assert timeline.peaks([100, 7]) == (200, 7)


def test_messages_take_time_in_their_channel_one_after_the_other() -> None:
    """Activations of 3 s: F0.1's is sent at 2 and has to wait for the channel until 4. Gradients take nothing."""
    both = parse(
        "0: F0.0 SEND:F0.0>1 RECV:B1.0>0 F0.1 SEND:F0.1>1 RECV:B1.1>0 B0.0 B0.1\n"
        "1: RECV:F0.0>1 RECV:F0.1>1 F1.0 B1.0 SEND:B1.0>0 F1.1 B1.1 SEND:B1.1>0"
    )
    found = times(both, Costs(equal_costs(2).seconds, {StageLink("F", 0, 1): 3.0}))
    assert (found["SEND:F0.0>1"], found["SEND:F0.1>1"]) == ((1, 4), (4, 7))
    assert (found["F1.0"], found["B1.0"], found["F1.1"]) == ((4, 5), (5, 7), (7, 8))
    assert found["RECV:F0.0>1"] == (0, 4), "posted at the start"
    assert found["SEND:B1.0>0"] == (7, 7)


def test_a_message_waits_for_its_receive() -> None:
    """Rank 1 posts the second receive after F1.2 only, at 4.5; the transfer cannot begin before."""
    late = parse("0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1\n1: RECV:F0.0>1 F1.0 F1.2 RECV:F0.1>1 F1.1")
    found = times(late, Costs({("F", 0): 1, ("F", 1): 1.5}, 0.5))
    assert found["SEND:F0.0>1"] == (1, 1.5)
    assert (found["SEND:F0.1>1"], found["RECV:F0.1>1"], found["F1.1"]) == ((4.5, 5), (4.5, 5), (5, 6.5))


def test_costs() -> None:
    costs = Costs({("F", 0): 1, ("I", 0): 2, ("W", 0): 4, ("B", 1): 8})
    assert costs.of(Action("B", 0, 3)) == 6 and costs.of(Action("B", 1, 3)) == 8
    assert equal_costs(1, 1, 2, 4).of(Action("B", 0, 0)) == 6
    with pytest.raises(ScheduleError, match="F1.0: the costs do not say what F of stage 1 takes"):
        costs.of(Action("F", 1, 0))


def test_a_schedule_that_never_ends_is_an_error_here_too() -> None:
    with pytest.raises(ScheduleError, match="the schedule stops before its end: rank 0 at B0.0, rank 1 at F1.1"):
        simulate(parse("0: F0.0 B0.0 F0.1 B0.1\n1: F1.0 F1.1 B1.0 B1.1"), equal_costs(2))
    swapped = parse("0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1\n1: RECV:F0.1>1 RECV:F0.0>1 F1.0 F1.1")
    with pytest.raises(ScheduleError, match="rank 1 at F1.0"):
        simulate(swapped, equal_costs(2))


def test_events_of_both_ends_of_a_message() -> None:
    events = simulate(TWO, equal_costs(2)).events
    assert [e.rank for e in events if isinstance(e.instruction, Send)] == [0, 0, 1, 1]
    assert sorted(e.rank for e in events if isinstance(e.instruction, Recv)) == [0, 0, 1, 1]
