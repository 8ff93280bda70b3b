"""Keys that pass round: an attention, its numbers and the sums of its gradients are of one rank's block."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

import pytest
import torch

from meshc import rules
from meshc.check import check_program
from meshc.program.program import PlainProgram
from meshc.text.printer import print_stage
from tests.check.test_lies import told
from tests.meaning.test_rings import Attends, Biased, trained


def ring(attention: str) -> PlainProgram:
    return trained(Attends(is_causal=True), "cp=3", {"x": torch.randn(2, 18, 16)}, attention).compiled


KINDS: Final[dict[str, Callable[[], PlainProgram]]] = {
    "ring": lambda: ring("ring"),
    "zigzag": lambda: ring("zigzag"),
    "bias and drops": lambda: trained(Biased((1, 2, 7, 7), dropout_p=0.4), "cp=3", {"x": torch.randn(3, 7, 16)}).compiled,
}


@pytest.fixture(scope="module", params=KINDS)
def program(request: pytest.FixtureRequest) -> PlainProgram:
    made = KINDS[request.param]()
    check_program(made, "program.json", rules)
    return made


def drop_shift(lines: list[str], at: int) -> None:
    found = re.match(r"\s*(\w+): .* = ring_shift\((\w+),", lines[at])
    assert found
    del lines[at]
    lines[at:] = [re.sub(rf"\b{found[1]}\b(?!\()", found[2], line) for line in lines[at:]]


def put(pattern: str, new: Callable[[re.Match[str]], str]) -> Callable[[list[str], int], None]:
    def change(lines: list[str], at: int) -> None:
        before, lines[at] = lines[at], re.sub(pattern, new, lines[at], count=1)
        assert before != lines[at]

    return change


PLANTED: Final[dict[str, tuple[str, Callable[..., None], str]]] = {
    "a shift dropped": (r" = ring_shift\(", drop_shift, r"one rank|no type says so"),
    "a shift doubled": (r" = ring_shift\(", put(r", 1\)", lambda _: ", 2)"), r"one rank|no type says so"),
    "another rank's place": (r" = ring_place\(", put(r", (\d), 3\)", lambda m: f", {3 - int(m[1])}, 3)"), r"one rank"),
    "a ring of other ranks": (
        r" = ring_place\(", put(r", 3\)", lambda _: ", 2)"), "a ring of 2 ranks by a place on cp, which has 3",
    ),
    "a tile of another size": (
        r" = tile_start\(.*ring_place", put(r"\((\d+), ", lambda m: f"({int(m[1]) + 3}, "), "numbers? of tiles of",
    ),
    "another count": (r" = tile_count\(.*ring_place", put(r"\((\d+), ", lambda m: f"({int(m[1]) - 1}, "), "numbers? of tiles of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_planted_is_told(program: PlainProgram, fault: str) -> None:
    """In each line where it can be. In zigzag order an attention takes no tile's start, but whose tile it is."""
    where, change, why = PLANTED[fault]
    lines = print_stage(program.stages["main"], program, comments=False).split("\n")
    places = [number for number, line in enumerate(lines) if re.search(where, line)]
    assert places or "attention_zigzag" in "".join(lines) and "tile" in where
    for place in places:
        said, _ = told(program, partial(change, at=place))
        assert re.search(why, said), said
