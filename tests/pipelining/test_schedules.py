"""All schedules of the folder: they run for any numbers, and with equal stages they idle and hold what their papers say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshc.errors import ScheduleError
from meshc.passes.stages import schedules
from meshc.passes.stages.schedules import build, fill_gaps, get, names
from meshc.passes.stages.schedules.numbered_steps import keep_microbatches
from meshc.pipelining import draw
from meshc.pipelining.activations import peaks
from meshc.pipelining.check import check
from meshc.pipelining.schedule import Action, chain, connect, parse
from meshc.pipelining.timing import Costs, Timeline, equal_costs, simulate

RANKS = range(2, 9)
MICROBATCHES = (1, 2, 3, 5, 8, 13, 16, 24, 32)


def run(name: str, ranks: int, microbatches: int, stages: int | None = None, times: tuple[float, float, float] = (1, 1, 1)) -> Timeline:
    """Simulated with stages that take ``times`` for forward, gradient of inputs, gradient of weights, and messages that take none."""
    schedule = build(name, ranks, microbatches, stages)
    return simulate(schedule, equal_costs(schedule.stages, *times))


def idles(timeline: Timeline) -> list[float]:
    return [round(idle, 9) for idle in timeline.idle_s]


@settings(max_examples=300)
@given(st.sampled_from(names()), st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_every_schedule_runs_and_is_read_back(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    kind = get(name)
    per_rank = chunks if kind.stages_per_rank is None else kind.stages_per_rank
    schedule = build(kind, ranks, microbatches, ranks * per_rank)
    check(schedule, chain(ranks * per_rank), stages=ranks * per_rank, microbatches=microbatches)
    assert parse(str(schedule)) == schedule
    assert [len({action.stage for action in actions}) for actions in schedule.actions] == [per_rank] * ranks
    ops = {action.op for actions in schedule.actions for action in actions}
    assert kind.trains == schedule.trains == (ops != {"F"})
    assert kind.splits_backward or "W" not in ops
    timeline = simulate(schedule, equal_costs(schedule.stages))
    assert len(timeline.events) == sum(map(len, schedule.lists)), "every action ran and every message came"


def test_the_drawing_in_a_docstring_is_what_the_schedule_does() -> None:
    drawn = {
        "gpipe": run("gpipe", 4, 4),
        "one_f_one_b": run("1f1b", 4, 6),
        "interleaved": run("interleaved", 2, 4),
        "zb_h1": run("zb_h1", 4, 6),
        "zb_v": run("zb_v", 3, 6),
        "dualpipe_v": run("dualpipe_v", 3, 6),
        "inference": run("inference", 4, 4, stages=4),
    }
    others = {"__init__", "fill_gaps", "schedule_kind", "numbered_steps"}
    files = {path.stem for path in Path(schedules.__file__).parent.glob("*.py")} - others
    assert files == set(drawn)
    for file, timeline in drawn.items():
        module = importlib.import_module(f"meshc.passes.stages.schedules.{file}")
        assert "".join(f"    {line}\n" for line in draw.text(timeline).splitlines()) in str(module.__doc__)


# What papers say.


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_gpipe_and_1f1b(ranks: int, microbatches: int) -> None:
    """Idle (p-1)/(m+p-1): arXiv 1811.06965, section 2.3, and 2104.04473, section 2.2, for any m. In flight: m; p-r, or m if less."""
    gpipe, plain = (run(name, ranks, microbatches, times=(1, 1.2, 0.8)) for name in ("gpipe", "1f1b"))
    share = (ranks - 1) / (microbatches + ranks - 1)
    assert gpipe.bubble == pytest.approx(share) and plain.bubble == pytest.approx(share)
    assert gpipe.peaks() == (microbatches,) * ranks
    assert plain.peaks() == tuple(min(ranks - rank, microbatches) for rank in range(ranks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_interleaved(ranks: int, chunks: int) -> None:
    """(p-1)/(vm+p-1): the paper's bubble, (p-1)/v of a microbatch beside m of them, as a share (arXiv 2104.04473, section 2.2.2).

    The paper wants p to divide m; here any m >= p does. Fewer microbatches cannot fill a pipeline of vp stages: m + vp - 1 steps.
    """
    for microbatches in MICROBATCHES:
        timeline = run("interleaved", ranks, microbatches, ranks * chunks)
        steps = chunks * microbatches + ranks - 1 if microbatches >= ranks else microbatches + chunks * ranks - 1
        assert timeline.makespan_s == pytest.approx(3 * steps)
        assert idles(timeline) == [3 * (steps - chunks * microbatches)] * ranks
        forward = run("inference", ranks, microbatches, ranks * chunks)
        assert forward.makespan_s == pytest.approx(steps)
        assert forward.peaks() == (0,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_what_interleaved_holds(ranks: int) -> None:
    """Megatron-LM's warm-up, (v-1)p + 2(p-r-1) forwards, and one more, where p divides m and there are two groups at least."""
    for chunks in (2, 3):
        assert run("interleaved", ranks, 4 * ranks, ranks * chunks).peaks() == tuple(
            (chunks - 1) * ranks + 2 * (ranks - rank) - 1 for rank in range(ranks)
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 1.5, 0.5), (1.5, 1, 1), (1, 1.2, 0.8)])
def test_zb_h1(ranks: int, times: tuple[float, float, float]) -> None:
    """Idle (p-1)(F+I-W) on each rank, at 1F1B's peak of p: table of section 2.3 of arXiv 2401.10241. Holds for m >= p, W <= F, W <= I."""
    forward, inputs, weights = times
    for microbatches in (ranks, ranks + 1, 2 * ranks, 32):
        timeline = run("zb_h1", ranks, microbatches, times=times)
        assert idles(timeline) == [round((ranks - 1) * (forward + inputs - weights), 9)] * ranks
        assert timeline.peaks() == (ranks,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v(ranks: int) -> None:
    """No idle time between a rank's first and last action where F = I = W: arXiv 2401.10241, section 6. Holds for m >= 2p-1.

    What is left are the stairs: rank r begins r forwards late and ends as much later. In flight: 2p half-size pairs, p of 1F1B's.
    """
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 1, 32):
        timeline = run("zb_v", ranks, microbatches)
        for rank, events in enumerate(timeline.action_events):
            assert (events[0].start_s, events[-1].end_s) == (rank, rank + 6 * microbatches)
        assert idles(timeline) == [ranks - 1] * ranks
        assert max(timeline.peaks()) == 2 * ranks
    for microbatches in range(ranks, 2 * ranks - 1):
        timeline = run("zb_v", ranks, microbatches)
        assert idles(timeline) == [ranks - 1] * ranks, "gradients of weights go into the gaps"
        assert max(timeline.peaks()) <= 2 * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (2, 2, 1.5)])
def test_dualpipe_v_one_by_one(ranks: int, times: tuple[float, float, float]) -> None:
    """As pairs need not begin and end together, it idles as ZB-H1 does, with stages half as long. Holds for m >= 2p, F = I, W no longer."""
    forward, inputs, weights = times
    for microbatches in (2 * ranks, 3 * ranks + 1, 32):
        timeline = run("dualpipe_v", ranks, microbatches, times=times)
        assert idles(timeline) == [round((ranks - 1) * (forward + inputs - weights), 9)] * ranks
        assert timeline.peaks() == (2 * ranks + 1,) * ranks, "PP + 1 in the README's table, whose PP is 2p"


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("pair", [2, 2.5, 3])
def test_dualpipe_v_in_pairs(ranks: int, pair: float) -> None:
    """(PP/2-1)(F&B + B - 3W) of the README of github.com/deepseek-ai/DualPipe; PP = 2p, F = I = W = 1, B = 2, F&B = ``pair``, m >= 2p.

    F&B takes B at least, its longer half, and F + B at most.
    """
    for microbatches in (2 * ranks, 3 * ranks + 1):
        assert idle_in_pairs(ranks, microbatches, pair) == (ranks - 1) * (pair + 2 - 3)


def idle_in_pairs(ranks: int, microbatches: int, pair_s: float) -> float:
    """The longest idle time of a rank if a forward and the backward after it are one step, as in dualpipev.py; F = I = W = 1.

    In that file the last rank's first such pair is not one step, "to further reduce bubble size".
    """
    lists = [list(actions) for actions in build("dualpipe_v", ranks, microbatches).actions]
    blocks: list[list[list[Action]]] = [[] for _ in lists]
    for rank, actions in enumerate(lists):
        apart = rank == ranks - 1
        while actions:
            size = 2 if [action.op for action in actions[:2]] == ["F", "B"] else 1
            if size == 2 and apart:
                size, apart = 1, False
            blocks[rank].append(actions[:size])
            del actions[:size]
    end: dict[tuple[str, int, int], float] = {}
    clock, busy, left = [0.0] * ranks, [0.0] * ranks, sum(map(len, blocks))
    while left:
        for rank in range(ranks):
            while blocks[rank] and all(need in end for action in blocks[rank][0] for need in needed(action, 2 * ranks)):
                block = blocks[rank].pop(0)
                takes = pair_s if len(block) == 2 else {"F": 1, "I": 1, "W": 1, "B": 2}[block[0].op]
                clock[rank] = takes + max([clock[rank], *(end[need] for action in block for need in needed(action, 2 * ranks))])
                busy[rank] += takes
                left -= 1
                for action in block:
                    end["B" if action.op == "I" else action.op, action.stage, action.microbatch] = clock[rank]
    return max(max(clock) - seconds for seconds in busy)


def needed(action: Action, stages: int) -> list[tuple[str, int, int]]:
    if action.op == "F":
        return [("F", action.stage - 1, action.microbatch)] if action.stage else []
    after = [("B", action.stage + 1, action.microbatch)] if action.stage + 1 < stages else []
    return [("F", action.stage, action.microbatch), *after] if action.op in "BI" else []


# Where gradients of weights go.


def drawn_zb_v(ranks: int, microbatches: int) -> list[list[Action]]:
    """The first 2p - 1 microbatches' schedule less those that are not there."""
    full = max(microbatches, 2 * ranks - 1)
    return keep_microbatches(build("zb_v", ranks, full).actions, microbatches)


def test_the_drawing_of_filling() -> None:
    drawn, filled = (simulate(connect(lists, chain(4)), equal_costs(4)) for lists in (drawn_zb_v(2, 2), build("zb_v", 2, 2).actions))
    for timeline in (drawn, filled):
        assert "".join(f"    {line}\n" for line in draw.text(timeline).splitlines()) in str(fill_gaps.__doc__)
    assert (drawn.makespan_s, filled.makespan_s) == (14, 13)


TIMES = st.floats(0.1, 3)


@given(st.integers(1, 4), st.integers(1, 9), st.lists(TIMES, min_size=24, max_size=24), st.sampled_from([0.0, 0.2]))
def test_filling_is_never_slower_and_never_holds_more(ranks: int, microbatches: int, times: list[float], send_s: float) -> None:
    stages = 2 * ranks
    costs = Costs(dict(zip([(op, stage) for op in "FIW" for stage in range(stages)], times, strict=False)), send_s)
    before = connect(drawn_zb_v(ranks, microbatches), chain(stages))
    after = build("zb_v", ranks, microbatches, costs=costs)
    check(after, chain(stages), microbatches=microbatches, trains=True)
    assert [[a for a in actions if a.op != "W"] for actions in after.actions] == [[a for a in b if a.op != "W"] for b in before.actions]
    assert simulate(after, costs).makespan_s <= simulate(before, costs).makespan_s * (1 + 1e-9)
    assert all(new <= old for new, old in zip(peaks(after.actions), peaks(before.actions), strict=True))


def test_filling_pays_where_stages_differ() -> None:
    """A head that takes half as much again: rank 0 is the busiest with 120 s; as drawn it idles 1.5 s more."""
    costs = Costs({(op, stage): 1.5 if stage == 7 else 1.0 for op in "FIW" for stage in range(8)})
    drawn = simulate(connect(drawn_zb_v(4, 16), chain(8)), costs)
    filled = simulate(build("zb_v", 4, 16, costs=costs), costs)
    assert (drawn.makespan_s, filled.makespan_s) == (121.5, 120)


# Finding them.


def test_names_and_sources() -> None:
    assert names() == ("1f1b", "dualpipe_v", "gpipe", "inference", "interleaved", "zb_h1", "zb_v")
    assert all(get(name).source for name in names())
    with pytest.raises(ScheduleError, match="there is no schedule '2f2b': use one of 1f1b, dualpipe_v, gpipe, "):
        get("2f2b")


@pytest.mark.parametrize(
    "name, ranks, microbatches, stages, says",
    [
        ("1f1b", 4, 8, 8, "1f1b has one stage on each rank: 4 ranks take 4 stages, not 8"),
        ("zb_v", 4, 8, 4, "zb_v has 2 stages on each rank: 4 ranks take 8 stages, not 4"),
        ("interleaved", 4, 8, 6, "interleaved: 6 stages do not go evenly on 4 ranks; cut the model into 4 or 8"),
        ("interleaved", 4, 8, 3, "interleaved: 3 stages do not go evenly on 4 ranks; cut the model into 4"),
        ("gpipe", 4, 0, 4, "gpipe: 4 ranks and 0 microbatches; there must be one of each at least"),
    ],
)
def test_numbers_that_do_not_suit(name: str, ranks: int, microbatches: int, stages: int, says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(name, ranks, microbatches, stages)
    assert str(caught.value) == says


# Schedules of a user's own.


def plain(ranks: int, stages: int, microbatches: int, costs: object) -> list[list[Action]]:
    """GPipe, with stage r on rank r."""
    return [[Action(op, rank, microbatch) for op in "FB" for microbatch in range(microbatches)] for rank in range(ranks)]


def test_a_function_a_text_and_a_schedule_are_taken_alike() -> None:
    gpipe = build("gpipe", 3, 2)
    assert build(plain, 3, 2) == gpipe
    assert build("\n".join(f"{rank}: F{rank}.0 F{rank}.1 B{rank}.0 B{rank}.1" for rank in range(3)), 3, 2) == gpipe
    assert build(str(gpipe), 3, 2) == gpipe
    assert build(gpipe, 3, 2) is gpipe


@pytest.mark.parametrize(
    "wanted, says",
    [
        ("0: F0.0", "the schedule has lists for 1 ranks; the pipeline has 2"),
        (
            lambda ranks, stages, microbatches, costs: [[]],
            "<lambda>(ranks=2, stages=2, microbatches=1, costs) made lists for 1 rank; the pipeline has 2",
        ),
        (
            lambda ranks, stages, microbatches, costs: [[Action("F", 0, 0)], ["F1.0"]],
            "<lambda>(ranks=2, stages=2, microbatches=1, costs): rank 1, position 0 is 'F1.0', no Action; messages are put in afterwards\n"
            "  what to do: return Action(op, stage, microbatch) (meshc.pipelining.schedule), or what `number_microbatches` makes",
        ),
    ],
)
def test_schedules_of_a_users_own_that_do_not_suit(wanted: Any, says: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(wanted, 2, 1)
    assert str(caught.value) == says
