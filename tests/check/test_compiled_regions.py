"""Regions of an edited text: what cannot be compiled whole, for all ranks and microbatches, is refused by its line."""

from __future__ import annotations

import pytest
import torch

from meshc.check import check_program
from meshc.errors import ArtifactError
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port
from meshc.text.parse import parse_stage

TEXT = """@ranks("dp=2,mb=2")
def main(
    x: "f32[8]" = "input:x",
):
    place: "int" = coordinate("mb")
    with region(0):
        minus: "f32[8]" = aten.neg(x)
    whole: "f32[8]" = all_reduce(minus, ["dp"], "max")
    scaled: "f32[8]" = aten.mul.Tensor(whole, place)
    parts: "(f32[4], f32[4])" = aten.split.Tensor(scaled, 4)
    with region(1):
        last: "f32[8]" = aten.exp(scaled)
    first: "f32[4]" = getitem(parts, 0)
    return {
        "output:y": last,
        "output:z": first,
    }
"""


def program(text: str, backend: str = "inductor") -> PlainProgram:
    x, y, z = (Port(kind, name, (size,), torch.float32) for kind, name, size in (("input", "x", 8), ("output", "y", 8), ("output", "z", 4)))
    runs = (Instruction("run", "main"),)
    stages = {"main": parse_stage(text, None, "main.py")}
    return PlainProgram(stages, Mesh("dp=2"), Plan("dp: -"), (x,), (y, z), runs, {}, {"dp": 2, "mb": 2}, 2, backend=backend)


def test_regions_of_what_can_be_compiled() -> None:
    check_program(program(TEXT), "program.json")


@pytest.mark.parametrize("start, why", [
    ("whole: ", "line 8: whole: it is in region 2, and talks to other ranks: it runs by itself"),
    ("place: ", "line 5: place: it is in region 2, and says where a rank or a microbatch stands: it runs by itself"),
    ("scaled: ", "line 9: scaled: it is in region 2, and is another for each microbatch: it runs by itself"),
    ("first: ", "line 13: first: it takes apart what parts makes, and they are not in one region"),
])  # fmt: skip
def test_what_runs_by_itself_is_in_no_region(start: str, why: str) -> None:
    (line,) = [line for line in TEXT.split("\n") if line.startswith("    " + start)]
    text = TEXT.replace(line, f"    with region(2): {line.strip()}")
    with pytest.raises(ArtifactError, match=why.replace("(", "\\(")):
        check_program(program(text), "program.json")


def test_a_program_for_the_eager_backend_has_none() -> None:
    with pytest.raises(ArtifactError, match="main.py, line 7: minus: it is in region 0, but the program is for the backend eager, which"):
        check_program(program(TEXT, "eager"), "program.json")


@pytest.mark.parametrize("old, new, why", [
    ("region(1)", "region(0)", "line 11: there is a region 0 above: the lines of a region stand together"),
    ("region(1)", "region(True)", "line 11: the only blocks are regions, by number: with region\\(3\\):"),
    ("region(1)", 'region("a")', "line 11: the only blocks are regions"),
    ("region(1)", "open(1)", "line 11: the only blocks are regions"),
    ("region(1)", "region(1) as one", "line 11: the only blocks are regions"),
    ("        last", "        with region(2):\n            last", "line 12: a line is NAME: .TYPE. = OPERATOR"),
])  # fmt: skip
def test_blocks_are_regions_with_a_number_of_their_own(old: str, new: str, why: str) -> None:
    with pytest.raises(ArtifactError, match=why):
        parse_stage(TEXT.replace(old, new), None, "main.py")
