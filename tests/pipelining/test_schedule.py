"""The language of schedules: text both ways, what cannot be read and how that is said, where messages go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshc.errors import ScheduleError
from meshc.pipelining.schedule import Action, Instruction, Message, Recv, Schedule, Send, StageLink, chain, connect, parse

TWO_RANKS = """\
0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1 RECV:B1.0>0 B0.0 B0.1
1: RECV:F0.0>1 RECV:F0.1>1 F1.0 B1.0 SEND:B1.0>0 F1.1 B1.1 SEND:B1.1>0"""


def refusal(text: str) -> str:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    return str(caught.value)


STAGES, MICROBATCHES = st.integers(0, 12), st.integers(0, 40)
ACTIONS = st.builds(Action, st.sampled_from("FBIW"), STAGES, MICROBATCHES)
MESSAGES = st.builds(Message, ACTIONS.filter(lambda action: action.op != "W"), STAGES).filter(lambda m: m.of.stage != m.to)
INSTRUCTIONS: st.SearchStrategy[Instruction] = st.one_of(ACTIONS, st.builds(Send, MESSAGES), st.builds(Recv, MESSAGES))


@given(st.lists(st.lists(INSTRUCTIONS, max_size=12), min_size=1, max_size=5), MESSAGES)
def test_what_is_printed_is_read_back(lists: list[list[Instruction]], message: Message) -> None:
    """Any lists, as long as one message is in them: without any, reading would put messages in."""
    schedule = Schedule((*map(tuple, lists), (Send(message),)))
    assert parse(str(schedule)) == schedule
    assert str(parse(str(schedule))) == str(schedule)


def test_words() -> None:
    schedule = parse(TWO_RANKS)
    assert str(schedule) == TWO_RANKS
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.trains) == (2, 2, 2, True)
    assert (schedule.rank_of(0), schedule.rank_of(1)) == (0, 1)
    assert [str(action) for action in schedule.actions[1]] == ["F1.0", "B1.0", "F1.1", "B1.1"]
    message = Message(Action("I", 3, 5), 1)
    assert (str(message), message.link, list(map(str, message.users))) == ("I3.5>1", StageLink("B", 3, 1), ["I1.5", "B1.5"])


def test_comments_and_blank_lines_and_the_order_of_ranks_do_not_matter() -> None:
    lines = TWO_RANKS.splitlines()
    schedule = parse(f"# mine\n\n{lines[1]}  # the last stage\n   {lines[0]}\n")
    assert schedule == parse(TWO_RANKS)
    assert schedule.lines == (4, 3)


def test_a_text_of_actions_alone_gets_its_messages() -> None:
    assert str(parse("0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 B1.0 F1.1 B1.1")) == (
        "0: F0.0 SEND:F0.0>1 RECV:B1.0>0 F0.1 SEND:F0.1>1 RECV:B1.1>0 B0.0 B0.1\n"
        "1: RECV:F0.0>1 F1.0 RECV:F0.1>1 B1.0 SEND:B1.0>0 F1.1 B1.1 SEND:B1.1>0"
    )


def test_what_cannot_be_read_is_shown_with_a_caret_and_the_fix() -> None:
    assert refusal("0: F0.0 f0.1\nF1.0\n1: W1.0>0 SEND:F1.0 SEND:W1.0>0\n1: SEND:W1.0>0\n0: F0.1\n2: RECV:F2.0>2\n3: F0.1>1") == (
        "the schedule cannot be read:\n"
        "  line 1: 0: F0.0 f0.1\n"
        "                  ^ write F, B, I or W with stage and microbatch, as in `F0.1`; or a message, as in `SEND:F0.1>1`\n"
        "  line 2: F1.0\n"
        "          ^ a line starts with its rank and a colon, as in `0: F0.0 F0.1 B0.0 B0.1`\n"
        "  line 3: 1: W1.0>0 SEND:F1.0 SEND:W1.0>0\n"
        "             ^ `W1.0>0` is a message: post it with `SEND:W1.0>0`, or with `RECV:W1.0>0` where it arrives\n"
        "  line 4: 1: SEND:W1.0>0\n"
        "             ^ gradients of weights stay where they are; a B or an I makes what is sent\n"
        "  line 6: 2: RECV:F2.0>2\n"
        "             ^ stage 2 has it already: drop the message\n"
        "  line 7: 3: F0.1>1\n"
        "             ^ `F0.1>1` is a message: post it with `SEND:F0.1>1`, or with `RECV:F0.1>1` where it arrives"
    )


@pytest.mark.parametrize(
    "text, says",
    [
        ("0: F0.0\n0: F0.1", "line 2: 0: F0.1\n          ^ rank 0 has a list in line 1: join the two"),
        ("0: F0.0\n2: F1.0", "ranks count from 0 without gaps: give rank 1 a line, which may be empty after its colon"),
        ("# nothing", "it has no line: write one for each rank, as in `0: F0.0 F0.1 B0.0 B0.1`"),
        ("1: RECV:B0.2", "^ say which stage it is for, as in `RECV:B0.2>1`"),
        ("0: F0.0 SEND:F0.0", "^ say which stage it is for, as in `SEND:F0.0>1`"),
    ],
)
def test_refusals(text: str, says: str) -> None:
    assert says in refusal(text)


def test_a_long_line_is_shown_around_its_fault() -> None:
    text = "0: " + " ".join(f"F0.{microbatch}" for microbatch in range(100)).replace("F0.50", "F0-50")
    _, line, caret = refusal(text).splitlines()
    assert len(line) < 130
    assert line[caret.index("^") :].startswith("F0-50 F0.51")
    assert line.startswith("  line 1: ... ") and line.endswith(" ...")


# Messages.


def actions(text: str) -> list[list[Action]]:
    return [[Action(token[0], *map(int, token[1:].split("."))) for token in line.split()] for line in text.splitlines()]


def test_a_receive_is_posted_before_the_action_that_precedes_its_user() -> None:
    schedule = connect(actions("F0.0 F0.1 F0.2 B0.0\nF1.0 B1.0 F1.1 F1.2"), chain(2))
    assert str(schedule).splitlines()[1] == "1: RECV:F0.0>1 F1.0 RECV:F0.1>1 B1.0 SEND:B1.0>0 RECV:F0.2>1 F1.1 F1.2"


def test_a_receive_is_posted_in_the_order_of_its_channel() -> None:
    """F1.1 comes first on rank 1, but rank 0 sends F0.0's first: both are posted before F1.1."""
    schedule = connect(actions("F0.0 F0.1\nF1.1 F1.0"), chain(2))
    assert str(schedule) == "0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1\n1: RECV:F0.0>1 RECV:F0.1>1 F1.1 F1.0"


def test_nothing_is_sent_between_stages_of_a_rank_and_skips_are_sent_where_they_go() -> None:
    """Stages 0 and 3 on rank 0, 1 and 2 on rank 1; a skip from 0 to 2 and one from 0 to 3."""
    skips = {StageLink("F", 0, 2), StageLink("B", 2, 0), StageLink("F", 0, 3), StageLink("B", 3, 0)}
    schedule = connect(actions("F0.0 F3.0 B3.0 I0.0 W0.0\nF1.0 F2.0 I2.0 I1.0 W2.0 W1.0"), chain(4) | skips)
    assert str(schedule) == (
        "0: RECV:F2.0>3 F0.0 SEND:F0.0>1 SEND:F0.0>2 F3.0 RECV:I2.0>0 RECV:I1.0>0 B3.0 SEND:B3.0>2 I0.0 W0.0\n"
        "1: RECV:F0.0>1 RECV:F0.0>2 F1.0 RECV:B3.0>2 F2.0 SEND:F2.0>3 I2.0 SEND:I2.0>0 I1.0 SEND:I1.0>0 W2.0 W1.0"
    )


def test_forwards_alone_are_connected() -> None:
    schedule = connect(actions("F0.0 F0.1\nF1.0 F1.1"), chain(2))
    assert str(schedule) == "0: F0.0 SEND:F0.0>1 F0.1 SEND:F0.1>1\n1: RECV:F0.0>1 RECV:F0.1>1 F1.0 F1.1"