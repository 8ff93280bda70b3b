"""Values of plain types that a stage hands to another: what is known of them where they are made is known where they are read."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import pytest

from meshc import rules
from meshc.check import check_program
from meshc.errors import ArtifactError
from meshc.ir import Record, record
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port
from meshc.text.parse import parse_stage

BEFORE = """@ranks("a=2,mb=2")
def before(
):
    zeros: "f32[vocab 5, hidden 3]" = aten.full([5, 3], 0.0, dtype=f32, device=cpu)
    coordinate: "int" = coordinate("a")
    start: "f32[5, 3]" = keep_first(zeros, coordinate)
    return {
        "value:start": start,
    }
"""
OTHER = """@ranks("a=2,mb=2")
def other(
):
    ones: "f32[vocab 5, hidden 3]" = aten.full([5, 3], 1.0, dtype=f32, device=cpu)
    return {
        "value:start": ones,
    }
"""
EACH = """@ranks("a=2,mb=2")
def each(
    index: "i64[batch 2/a]" = "input:index",
    rows: "f32[batch 2/a, hidden 3]" = "input:rows",
    start: "f32[5, 3]" = "value:start",
):
    added: "f32[vocab 5, hidden 3] partial(sum: a)" = aten.index_put(start, [index], rows, True)
    whole: "f32[vocab 5, hidden 3]" = all_reduce(added, ["a"], "sum")
    return {
        "part:whole": whole,
    }
"""
AFTER = """@ranks("a=2,mb=2")
def after(
    whole: "f32[vocab 5, hidden 3]" = "sum:whole",
):
    y: "f32[vocab 5, hidden 3]" = aten.sin(whole)
    return {
        "output:y": y,
    }
"""


def run(name: str, microbatch: int = 0) -> Instruction:
    return Instruction("run", name, microbatch)


def add(microbatch: int, op: str = "add", into: str = "sum:whole") -> Instruction:
    return Instruction(op, "each", microbatch, "part:whole", into)


LIST = (run("before"), run("each"), add(0), run("each", 1), add(1), run("after"))


def port(key: str, value: Record) -> Port:
    assert value.dtype is not None and value.sharding is not None
    return Port(*key.split(":", 1), value.sharding.shape, value.dtype, value.sharding)  # type: ignore[arg-type]


def program(before: str = BEFORE, each: str = EACH, more: str = "", schedule: tuple[Instruction, ...] = LIST) -> PlainProgram:
    """Each of two microbatches adds a row of every rank to what was made before."""
    texts = {"before": before, "other": more, "each": each, "after": AFTER}
    stages = {name: parse_stage(text, None, f"{name}.py") for name, text in texts.items() if text}
    inputs = [port(key, record(node)) for node, key in stages["each"].keys().items() if key.startswith("input:")]
    (y,) = stages["after"].results().values()
    return PlainProgram(
        stages, Mesh("a=2"), Plan("a: -"), tuple(inputs), (port("output:y", record(y)),), schedule, {}, {"a": 2, "mb": 2}, 2
    )


def told(made: PlainProgram) -> str:
    with pytest.raises(ArtifactError) as caught:
        check_program(made, "program.json", rules)
    return str(caught.value)


def test_one_row_a_rank_is_added_to_what_another_stage_makes() -> None:
    check_program(program(), "program.json", rules)


@pytest.mark.parametrize("old, new, why", [
    (" partial(sum: a)", "", "line 7: added = aten.index_put(...): its operator makes it partial(sum: a), declared is partial over nothing"),
    ('["a"], "sum")', '["a"], "max")', "line 8: whole = all_reduce(...): its operand is not partial over a for a max"),
    (", True)", ")", "line 7: added = aten.index_put(...): dim 0 of index is [batch 2/a]: aten.index_put takes it whole"),
    ("rows: \"f32[batch 2/a, hidden 3]", "rows: \"f32[1, hidden 3]", "line 7: added = aten.index_put(...): dim 0 of index is [batch 2/a]: aten.index_put takes it whole"),
])  # fmt: skip
def test_a_sum_of_rows_is_one_all_the_same(old: str, new: str, why: str) -> None:
    assert EACH.count(old) == 1 and why in told(program(each=EACH.replace(old, new)))


def test_what_every_rank_adds_to_its_part_is_a_part() -> None:
    """In one stage or in two: each rank would add all of it."""
    why = "start is added on each rank to its part of a sum over a, and is no part itself: keep_first makes it one"
    assert why in told(program(before=BEFORE.replace('"value:start": start', '"value:start": zeros')))
    assert why in told(program(each=EACH.replace('start: "f32[5, 3]"', 'start: "f32[vocab 5, hidden 3]"')))


def test_nothing_is_known_of_what_two_stages_make_unlike() -> None:
    """Which of them made it is said by the schedule, where either may come last."""
    wrong = EACH.replace(" partial(sum: a)", "")
    assert "its operator makes it partial(sum: a)" in told(program(each=wrong, more=BEFORE.replace("def before", "def other")))
    assert "takes it whole" in told(program(more=OTHER))


@pytest.mark.parametrize("step, why", [
    (add(1, into="value:start"), "the schedule takes part:whole into value:start by add; it goes into sum:whole by add"),
    (add(1, op="max"), "the schedule takes part:whole into sum:whole by max; it goes into sum:whole by add"),
])  # fmt: skip
def test_a_part_goes_into_its_whole(step: Instruction, why: str) -> None:
    assert f"program.json: {why}" in told(program(schedule=(*LIST[:4], step, LIST[5])))
