"""Starts of an edited text: what is no collective of whole sums, or starts where they are not whole, is refused by its line."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from meshc.check import check_program
from meshc.errors import ArtifactError
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port
from meshc.text.parse import parse_stage

EACH = """@ranks("dp=2,mb=2")
def each(
    x: "f32[4]" = "input:x",
):
    a: "f32[4]" = aten.sin(x)
    b: "f32[4]" = aten.neg(x)
    return {
        "part:a": a,
        "part:b": b,
    }
"""
START = """@ranks("dp=2,mb=2")
def start_r(
    a: "f32[4]" = "sum:a",
):
    half: "f32[4]" = aten.mul.Tensor(a, 0.5)
    r: "f32[4]" = all_reduce(half, ["dp"], "sum")
    return {
        "early:r": r,
    }
"""
AFTER = """@ranks("dp=2,mb=2")
def after(
    r: "f32[4]" = "early:r",
    b: "f32[4]" = "sum:b",
):
    y: "f32[4]" = aten.add.Tensor(r, b)
    return {
        "output:y": y,
    }
"""


def run(microbatch: int) -> list[Instruction]:
    return [Instruction("run", "each", microbatch), *(Instruction("add", "each", microbatch, f"part:{n}", f"sum:{n}") for n in "ab")]


BEGIN = Instruction("start", "start_r", 1, keys=("sum:a",), during="each")
LIST = (*run(0), *run(1), BEGIN, Instruction("run", "after"))


def program(each: str = EACH, start: str = START, after: str = AFTER, schedule: tuple[Instruction, ...] = LIST) -> PlainProgram:
    stages = {name: parse_stage(text, None, f"{name}.py") for name, text in (("each", each), ("start_r", start), ("after", after))}
    x, y = Port("input", "x", (4,), torch.float32), Port("output", "y", (4,), torch.float32)
    return PlainProgram(stages, Mesh("dp=2"), Plan("dp: -"), (x,), (y,), schedule, {}, {"dp": 2, "mb": 2}, 2)


def told(made: PlainProgram) -> str:
    with pytest.raises(ArtifactError) as caught:
        check_program(made, "program.json")
    return str(caught.value)


def test_a_start_that_is_sound() -> None:
    check_program(program(), "program.json")


@pytest.mark.parametrize("old, new, why", [
    ('"sum:a"', '"input:x"', "start_r.py, line 3: a: start_r is started, and reads sums alone; input:x is none"),
    ("aten.mul.Tensor(a, 0.5)", "aten.full([4], 1.0, dtype=f32, device=cpu)", "line 5: half: start_r is started, and is made of sums alone"),
    ('["dp"]', '["mb"]', "line 6: r: start_r is started, and ranks of several pipeline stages, or several microbatches, start nothing together"),
    ("aten.mul.Tensor(a, 0.5)", 'all_reduce(a, ["dp"], "sum")', "line 6: r: start_r is started, and is one collective with what prepares it; half stands above"),
    ('"early:r": r,', '"early:r": r,\n        "early:s": r,', "line 8: start_r is started: it gives r under a key that begins with early: and nothing else"),
    ('"early:r": r', '"early:r": half', "line 8: start_r is started: it gives r under a key that begins with early: and nothing else"),
    ('all_reduce(half, ["dp"], "sum")', "aten.relu(half)", "start_r is started, and has no collective"),
    ("    half:", "    with region(0):\n        half:", "and runs beside regions of another stage: it stands in none itself"),
])  # fmt: skip
def test_what_starts_is_one_collective_of_sums(old: str, new: str, why: str) -> None:
    assert why in told(replace(program(start=START.replace(old, new)), backend="inductor"))


def test_only_what_is_started_is_on_its_way() -> None:
    each = EACH.replace('"part:b": b', '"early:b": b')
    assert "each.py, line 9: early:b is on its way: only a stage that is started, and not run, gives such a value" in told(program(each=each))
    run_too = (*LIST[:-1], Instruction("run", "start_r"), LIST[-1])
    assert "early:r is on its way: only a stage that is started" in told(program(schedule=run_too))


@pytest.mark.parametrize("schedule, why", [
    ((*run(0), replace(BEGIN, microbatch=0), *run(1), LIST[-1]), "start_r starts with sum:a, to which each of microbatch 1 adds afterwards"),
    ((*run(0), BEGIN, *run(1), LIST[-1]), "start_r starts within each of microbatch 1: it stands behind that run, what that adds"),
    ((*run(0), *run(1), replace(BEGIN, during="after"), LIST[-1]), "start_r starts within after of microbatch 1: it stands behind that run"),
    ((*run(0), *run(1), replace(BEGIN, keys=("sum:b",)), LIST[-1]), "start_r waits for sum:b, and reads sum:a"),
    ((*run(0), *run(1), replace(BEGIN, keys=()), LIST[-1]), "start_r waits for nothing, and reads sum:a"),
    ((*run(0), *run(1), BEGIN, BEGIN, LIST[-1]), "start_r starts twice"),
    ((BEGIN, *run(0), *run(1), LIST[-1]), "start_r of microbatch 1 needs sum:a, which is not there"),
    ((*run(0), *run(1), LIST[-1]), "after of microbatch 0 needs early:r, which is not there"),
    ((*run(0), *run(1), replace(BEGIN, stage="start_s"), LIST[-1]), "the schedule starts 'start_s', but the stages are each, start_r, after"),
])  # fmt: skip
def test_it_starts_where_its_sums_are_whole(schedule: tuple[Instruction, ...], why: str) -> None:
    assert re.search(re.escape(f"program.json: {why}"), told(program(schedule=schedule)))
