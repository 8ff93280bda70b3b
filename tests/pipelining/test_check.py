"""What a schedule is refused for, before anything runs, and that each refusal names the instruction."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshc.errors import ScheduleError
from meshc.passes.stages.schedules import build, get, names
from meshc.pipelining.check import check
from meshc.pipelining.schedule import Action, Instruction, Message, Recv, Schedule, Send, StageLink, chain, connect, parse
from meshc.pipelining.timing import equal_costs, simulate

GOOD = """\
0: F0.0 SEND:F0.0>1 RECV:I1.0>0 F0.1 SEND:F0.1>1 RECV:I1.1>0 I0.0 W0.0 I0.1 W0.1
1: RECV:F0.0>1 F1.0 RECV:F0.1>1 I1.0 SEND:I1.0>0 F1.1 W1.0 I1.1 SEND:I1.1>0 W1.1"""


def refusal(text: str, links: Collection[StageLink] = chain(2), **more: object) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(parse(text), links, **more)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_good_one_is_passed() -> None:
    check(parse(GOOD), chain(2), stages=2, microbatches=2)
    check(parse("0: F0.0\n1: F1.0"), chain(2))


@pytest.mark.parametrize(
    "old, new, says",
    [
        (" SEND:F0.1>1", "", ["rank 0: SEND:F0.1>1 is missing, for which rank 1, position 2, RECV:F0.1>1 (line 2) waits; put it after"]),
        ("RECV:F0.1>1 ", "", ["rank 1: RECV:F0.1>1 is missing, which rank 1, position 4, F1.1 (line 2) needs; put it before that"]),
        (" W0.1", "", ["rank 0: W0.1 is missing, the other half of rank 0, position 8, I0.1 (line 1); add it after that"]),
        (" I0.1", "", ["rank 0: I0.1 is missing, which rank 0, position 8, W0.1 (line 1) needs; add it before that, or make that a B"]),
        (" I0.1 W0.1", "", ["rank 0: B0.1 is missing, the backward of stage 0 on microbatch 1; add it, or I and W"]),
        ("F0.1 ", "", ["rank 0: F0.1 is missing, the forward of stage 0 on microbatch 1; add it"]),
        ("I0.0 W0.0", "W0.0 I0.0", ["rank 0, position 6, W0.0 (line 1): needs I0.0, which comes after it, at position 7; put I0.0 first"]),
        ("W1.1", "W1.1 B1.1", ["rank 1, position 7, I1.1 (line 2): B1.1 is the whole backward; keep B1.1, or I and W"]),
        ("W1.1", "W1.1 W0.1", ["rank 1, position 10, W0.1 (line 2): is there already, at rank 0, position 9; keep one"]),
        ("W1.1", "W1.1 F0.2", ["rank 1, position 10, F0.2 (line 2): stage 0 is rank 0's; move it there"]),
        ("F0.0 SEND:F0.0>1", "SEND:F0.0>1 F0.0", ["rank 0, position 0, SEND:F0.0>1 (line 1): stands before F0.0 (position 1)"]),
        ("RECV:F0.0>1 F1.0", "F1.0 RECV:F0.0>1", ["rank 1, position 1, RECV:F0.0>1 (line 2): stands after F1.0 (position 0)"]),
        ("RECV:I1.1>0", "RECV:B1.1>0", ["RECV:B1.1>0 (line 1): nothing makes it: B1.1 is in no list; I1.1 makes what is sent"]),
        ("W0.1", "W0.1 SEND:F0.7>1", ["SEND:F0.7>1 (line 1): nothing makes it: F0.7 is in no list; drop it"]),
        ("W0.1", "W0.1 SEND:F0.1>7", ["SEND:F0.1>7 (line 1): nothing needs it: F7.1 is in no list; drop it"]),
        ("W0.1", "W0.1 RECV:F0.1>1", ["rank 1, position 2, RECV:F0.1>1 (line 2): is there already, at rank 0, position 10; keep one"]),
        ("W0.1", "W0.1 SEND:I0.1>1", ["SEND:I0.1>1 (line 1): stage 0 has nothing for stage 1; drop it"]),
        (
            "RECV:F0.0>1 F1.0 RECV:F0.1>1",
            "RECV:F0.1>1 RECV:F0.0>1 F1.0",
            ["rank 1, position 0, RECV:F0.1>1 (line 2): at its turn comes F0.0>1, which rank 0, position 1, SEND:F0.0>1 (line 1) gives"],
        ),
    ],
)
def test_one_fault(old: str, new: str, says: list[str]) -> None:
    assert old in GOOD
    message = refusal(GOOD.replace(old, new, 1))
    for part in says:
        assert part in message


def test_messages_on_the_wrong_rank() -> None:
    moved = GOOD.replace("RECV:F0.1>1 ", "").replace("0: F0.0", "0: RECV:F0.1>1 F0.0")
    assert "rank 0, position 0, RECV:F0.1>1 (line 1): rank 1 needs it; move it there" in refusal(moved)
    same_rank = "0: F0.0 SEND:F0.0>1 RECV:F0.0>1 F1.0"
    assert "rank 0, position 1, SEND:F0.0>1 (line 1): rank 0 has both stages and sends itself nothing; drop it" in refusal(same_rank)


def test_all_faults_are_told_at_once_up_to_twenty() -> None:
    lines = refusal("0: B0.0 F0.0 W0.1\n1: F1.0 B1.0", stages=3).splitlines()
    assert lines == [
        "the schedule cannot run:",
        "  rank 0: F0.1 is missing, the forward of stage 0 on microbatch 1; add it",
        "  rank 0: I0.1 is missing, which rank 0, position 4, W0.1 (line 1) needs; add it before that, or make that a B",
        "  rank 1: F1.1 is missing, the forward of stage 1 on microbatch 1; add it",
        "  rank 1: B1.1 is missing, the backward of stage 1 on microbatch 1; add it, or I and W",
        "  stage 2 is run by no rank: give it to one, as in `F2.0`",
        "  rank 0, position 1, B0.0 (line 1): needs F0.0, which comes after it, at position 2; put F0.0 first",
    ]
    assert refusal("0: F0.0 B0.40").endswith("\n  and 61 more")


def test_how_many_there_should_be() -> None:
    message = refusal(GOOD, stages=1, microbatches=1)
    assert "rank 1, position 1, F1.0 (line 2): there are 1 stages, 0 to 0; drop it" in message
    assert "rank 0, position 3, F0.1 (line 1): there are 1 microbatches, 0 to 0; drop it" in message
    assert "rank 0: F0.2 is missing" in refusal(GOOD, microbatches=3)
    assert "rank 0: B0.0 is missing" in refusal("0: F0.0\n1: F1.0", trains=True)
    assert "rank 0, position 6, I0.0 (line 1): nothing is trained, so there are no backwards; drop it" in refusal(GOOD, trains=False)


def test_a_circle_is_shown_rank_by_rank() -> None:
    """Each order is fine by itself: rank 0 wants a gradient before it goes on, rank 1 both activations before it gives one."""
    assert refusal("0: F0.0 B0.0 F0.1 B0.1\n1: F1.0 F1.1 B1.0 B1.1") == (
        "the schedule cannot run:\n"
        "  ranks wait for each other:\n"
        "    rank 0, position 3, B0.0 (line 1) waits for B1.0>0, which comes from rank 1, position 4, B1.0 (line 2)\n"
        "    rank 1, position 3, F1.1 (line 2) waits for F0.1>1, which comes from rank 0, position 5, F0.1 (line 1)\n"
        "    each waits for what another has behind the place where it waits itself; move one of these to before its rank's wait"
    )


def test_a_rank_outside_the_circle_is_not_in_it() -> None:
    message = refusal("0: F0.0 B0.0 F0.1 B0.1\n1: F1.0 F1.1 B1.0 B1.1\n2: F2.0 B2.0 F2.1 B2.1", chain(3))
    assert message.count("\n    rank ") == 2 and "rank 2" not in message


def test_memory() -> None:
    schedule = build("1f1b", 3, 6)
    check(schedule, chain(3), stage_bytes=[1000, 1000, 5000], budget=[3000, 2000, 5000])
    with pytest.raises(ScheduleError) as caught:
        check(schedule, chain(3), stage_bytes=[1000, 1000, 5000], budget=2500)
    assert str(caught.value) == (
        "1f1b cannot run:\n"
        "  rank 0, position 5, F0.2: 3 activations in flight, 3,000 bytes, where 2,500 are allowed; use a schedule that holds fewer, "
        "or smaller microbatches\n"
        "  rank 2, position 1, F2.0: 1 activations in flight, 5,000 bytes, where 2,500 are allowed; use a schedule that holds fewer, "
        "or smaller microbatches"
    )


def test_a_split_backward_frees_with_its_second_half() -> None:
    schedule = parse("0: F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")
    check(schedule, chain(1), stage_bytes=[10], budget=20)
    with pytest.raises(ScheduleError, match=r"position 2, F0\.1 \(line 1\): 2 activations in flight, 20 bytes, where 19 are allowed"):
        check(schedule, chain(1), stage_bytes=[10], budget=19)


def test_links_that_skip_stages() -> None:
    """Stage 0 also gives to stage 2, which sends a gradient back: both are looked for, and waited for."""
    links = chain(3) | {StageLink("F", 0, 2), StageLink("B", 2, 0)}
    text = "0: F0.0 B0.0\n1: F1.0 B1.0\n2: F2.0 B2.0"
    schedule = parse(text, links)
    check(schedule, links)
    assert "SEND:F0.0>2" in str(schedule) and "RECV:B2.0>0" in str(schedule)
    without = str(parse(text))
    assert "rank 0: SEND:F0.0>2 is missing, which F2.0 needs; put it after rank 0, position 1, F0.0 (line 1)" in refusal(without, links)
    assert "SEND:F0.0>2 (line 1): stage 0 has nothing for stage 2; drop it" in refusal(str(schedule), chain(3))


# Planted faults in schedules of all kinds.


def edited(schedule: Schedule, rank: int, items: list[Instruction]) -> Schedule:
    return Schedule(tuple(tuple(items) if r == rank else old for r, old in enumerate(schedule.lists)))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    kind = get(draw(st.sampled_from(names())))
    ranks = draw(st.integers(1, 5))
    return build(kind, ranks, draw(st.integers(1, 10)), ranks * (kind.stages_per_rank or draw(st.integers(1, 3))))


@given(schedules(), st.data())
def test_any_instruction_that_is_dropped_is_missed(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, items in enumerate(schedule.lists) if items]))
    at = data.draw(st.integers(0, len(schedule.lists[rank]) - 1))
    gone = schedule.lists[rank][at]
    expected = str(gone)
    if isinstance(gone, Action) and len([a for a in schedule.actions[rank] if a.stage == gone.stage]) == 1:
        expected = f"stage {gone.stage} is run by no rank"
    with pytest.raises(ScheduleError) as caught:
        check(
            edited(schedule, rank, [*schedule.lists[rank][:at], *schedule.lists[rank][at + 1 :]]),
            chain(schedule.stages),
            microbatches=schedule.microbatches,
            trains=schedule.trains,
        )
    assert expected in str(caught.value)


@given(schedules(), st.sampled_from([Send, Recv]), st.data())
def test_two_messages_of_a_channel_that_are_swapped(schedule: Schedule, end: type[Send] | type[Recv], data: st.DataObject) -> None:
    pairs = [
        (rank, a, b)
        for rank, items in enumerate(schedule.lists)
        for a, b in itertools.combinations([at for at, item in enumerate(items) if isinstance(item, end)], 2)
        if channel(schedule, items[a]) == channel(schedule, items[b])
    ]
    assume(pairs)
    rank, a, b = data.draw(st.sampled_from(pairs))
    items = list(schedule.lists[rank])
    items[a], items[b] = items[b], items[a]
    with pytest.raises(ScheduleError) as caught:
        check(edited(schedule, rank, items), chain(schedule.stages))
    assert str(items[a]) in str(caught.value) or str(items[b]) in str(caught.value)


def channel(schedule: Schedule, item: Instruction) -> tuple[int, int]:
    assert not isinstance(item, Action)
    return schedule.rank_of(item.message.of.stage), schedule.rank_of(item.message.to)


@given(schedules(), st.data())
def test_a_backward_before_its_forward(schedule: Schedule, data: st.DataObject) -> None:
    backwards = [action for actions in schedule.actions for action in actions if action.op in "BI"]
    assume(backwards)
    backward = data.draw(st.sampled_from(backwards))
    rank = schedule.rank_of(backward.stage)
    items = [item for item in schedule.lists[rank] if item != backward]
    items.insert(items.index(Action("F", backward.stage, backward.microbatch)), backward)
    with pytest.raises(ScheduleError) as caught:
        check(edited(schedule, rank, items), chain(schedule.stages))
    assert f"{backward}: needs F{backward.stage}.{backward.microbatch}, which comes after it" in str(caught.value)


SMALL = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 2), st.integers(0, 1))
POSTED = st.builds(Message, SMALL, st.integers(0, 2))


@settings(max_examples=300)
@given(st.lists(st.lists(st.one_of(SMALL, st.builds(Send, POSTED), st.builds(Recv, POSTED)), max_size=6), min_size=1, max_size=3))
def test_anything_at_all_is_refused_in_words(lists: list[list[Instruction]]) -> None:
    """Lists drawn from a hat: three stages are never right by chance, and no list is so odd that `check` itself fails."""
    with pytest.raises(ScheduleError):
        check(Schedule(tuple(map(tuple, lists))), chain(4), stage_bytes=[1], budget=1)


@settings(max_examples=300)
@given(schedules(), st.data())
def test_a_schedule_with_anything_put_in_is_refused_in_words(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    items = list(schedule.lists[rank])
    items.insert(data.draw(st.integers(0, len(items))), data.draw(st.one_of(SMALL, st.builds(Send, POSTED), st.builds(Recv, POSTED))))
    with pytest.raises(ScheduleError):
        check(
            edited(schedule, rank, items),
            chain(schedule.stages),
            stages=schedule.stages,
            microbatches=schedule.microbatches,
            trains=schedule.trains,
        )


# Any order at all, against the graph of what must come before what.


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=4), st.integers(1, 3), st.booleans(), st.data())
def test_check_passes_what_has_an_order_and_nothing_else(owners: list[int], microbatches: int, split: bool, data: st.DataObject) -> None:
    """Random lists of all actions: `check` passes them exactly if their happens-before graph can be walked to its end."""
    ops = "FIW" if split else "FB"
    lists: list[list[Action]] = []
    for rank in range(3):
        mine = [Action(op, stage, mb) for mb in range(microbatches) for op in ops for stage, owner in enumerate(owners) if owner == rank]
        # Mostly in order, so that many do run: some actions trade places.
        for a, b in data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=2)) if mine else ():
            a, b = a % len(mine), b % len(mine)
            mine[a], mine[b] = mine[b], mine[a]
        lists.append(mine)
    schedule = connect(lists, chain(len(owners)))
    if runs(lists, len(owners)):
        check(schedule, chain(len(owners)))
        assert len(simulate(schedule, equal_costs(len(owners))).events) == sum(map(len, schedule.lists))
    else:
        with pytest.raises(ScheduleError):
            check(schedule, chain(len(owners)))


def runs(lists: list[list[Action]], stages: int) -> bool:
    """Takes from the head of any list whatever needs nothing that is still to come."""
    left = [list(actions) for actions in lists]
    waiting = {action for actions in lists for action in actions}
    moved = True
    while moved:
        moved = False
        for actions in left:
            while actions and not needed(actions[0], stages) & waiting:
                waiting.remove(actions.pop(0))
                moved = True
    return not waiting


def needed(action: Action, stages: int) -> set[Action]:
    stage, mb = action.stage, action.microbatch
    if action.op == "F":
        return {Action("F", stage - 1, mb)}
    if action.op == "W":
        return {Action("I", stage, mb)}
    return {Action("F", stage, mb), Action("I", stage + 1, mb), Action("B", stage + 1, mb)}
