"""Windows: what a halo brings is what the operator that reads it goes by, and so is the way back."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import rules
from meshc.check import check_program, sharding_walk
from meshc.program.program import PlainProgram
from meshc.text.parse import parse_stage
from tests.check.test_lies import told

TEXT = """@ranks("cp=2")
def main(
    x: "f32[batch 2, in 3, height 16/cp, width 4]" = "input:x",
    w: "f32[out 4, in 3, k 3, l 3]" = "input:w",
    t: "f32[in 3, out 4, k 4, l 3]" = "input:t",
    s: "f32[batch 2, in 3, height 8/cp, width 4]" = "input:s",
    g: "f32[batch 2, out 4, height 16/cp, width 4]" = "input:g",
):
    LINES
    return {
        "output:x": x,
    }
"""


def found(*lines: str) -> list[tuple[str, str]]:
    return list(sharding_walk.faults(parse_stage(TEXT.replace("LINES", "\n    ".join(lines))), {"cp": 2}, rules))


def halo(window: str, length: int, fill: str = "0.0", size: int = 16) -> str:
    return f'h: "f32[2, 3, {length}, 4]" = halo(x, ["cp"], 2, {size}, {window}, {fill})'


CONVOLVED: Final = 'y: "f32[batch 2, out 4, height 16/cp, width 4]" = aten.convolution(h, w, None, [1, 1], [0, 1], [1, 1], False, [0, 0], 1)'
STRIDED: Final = 'y: "f32[batch 2, out 4, height 8/cp, width 4]" = aten.convolution(h, w, None, [2, 1], [0, 1], [1, 1], False, [0, 0], 1)'
MAXIMUM: Final = ('m: "(f32[2, 3, 4, 4], i64[2, 3, 4, 4])" = aten.max_pool2d_with_indices(h, [3, 3], [2, 1], [0, 1], [1, 1], False)',
                  'y: "f32[batch 2, in 3, height 8/cp, width 4]" = getitem(m, 0)')  # fmt: skip
LARGER: Final = 'c: "f32[2, 4, 10, 4]" = aten.convolution(s, t, None, [2, 1], [0, 1], [1, 1], True, [0, 0], 1)'
GRADIENTS: Final = ('b: "(f32[2, 3, 10, 4], f32[4, 3, 3, 3], f32[4])" = aten.convolution_backward(g, h, w, [4], [1, 1], [0, 1], [1, 1], False, [0, 0], 1, [True, True, True])',
                    'd: "f32[2, 3, 10, 4]" = getitem(b, 0)')  # fmt: skip


def summed(of: str, window: str, channels: str = "out 4") -> str:
    return f'y: "f32[batch 2, {channels}, height 16/cp, width 4]" = halo_sum({of}, ["cp"], 2, 16, {window})'


SOUND = [
    (halo("[16, 1, -1, 10]", 10), CONVOLVED),
    (halo("[8, 2, -1, 9]", 9), STRIDED),
    (halo("[8, 2, -1, 9]", 9, "-inf"), *MAXIMUM),
    (LARGER, summed("c", "[8, 2, -1, 10]")),
    ('y: "f32[batch 2, in 3, height 16/cp, width 4]" = halo(x, ["cp"], 2, 16, [16, 1, 3, 8], 1.0)',),  # rows as a program takes them
    ('y: "f32[batch 2, in 3, height 8/cp, width 2]" = aten.avg_pool2d(x, [2, 2], [2, 2])',),  # all of a window lies in one tile
    (halo("[16, 1, -1, 10]", 10), *GRADIENTS, summed("d", "[16, 1, -1, 10]", "in 3")),
]  # fmt: skip


@pytest.mark.parametrize("lines", SOUND)
def test_sound_lines_are_let_through(lines: tuple[str, ...]) -> None:
    assert found(*lines) == []


ENDS: Final = "by aten.convolution, which pads both ends alike; windows that begin at"
WRONG = [
    ("y", (halo("[16, 1, 0, 10]", 10), CONVOLVED), f"dim 2 of h is read {ENDS} 0 reach 0 before its first element and 2 behind its last"),
    ("y", (halo("[16, 1, -2, 10]", 10), CONVOLVED), f"dim 2 of h is read {ENDS} -2 reach 2 before its first element and 0 behind its last"),
    ("y", (halo("[16, 2, -1, 10]", 10), CONVOLVED), "with windows of stride 1 over 10 elements; the halo has 8 positions, stride 2 and 10 elements"),
    ("y", (halo("[16, 1, -1, 10]", 10, "1.0"), CONVOLVED), "beyond the ends of dim 2 h holds 1.0, and aten.convolution reads 0.0 there"),
    ("y", (halo("[15, 1, -1, 10]", 10), CONVOLVED), "the windows of h are those of 15 positions over cp, and these are 16 over cp"),
    ("h", (halo("[16, 1, -1, 10]", 10, size=15), CONVOLVED), "it is of a dim of 15 positions over cp, and these are 16 over cp"),
    ("y", (halo("[8, 2, 0, 9]", 9), STRIDED), f"{ENDS} 0 reach 0 before its first element and 1 behind its last"),
    ("y", (halo("[8, 2, -2, 9]", 9), STRIDED), f"{ENDS} -2"),
    ("m", (halo("[8, 2, -1, 9]", 9), *MAXIMUM), "beyond the ends of dim 2 h holds 0.0, and aten.max_pool2d_with_indices reads -inf there"),
    ("m", (halo("[8, 2, 0, 9]", 9, "-inf"), *MAXIMUM), "by aten.max_pool2d_with_indices, which pads both ends alike"),
    ("y", (LARGER, summed("c", "[8, 2, 0, 10]")), f"its operand was made {ENDS} 0"),
    ("y", (LARGER, summed("c", "[8, 1, -1, 10]")), "its operand was made by aten.convolution, of which 4 positions go with windows of stride 2 over 10"),
    ("y", (halo("[16, 1, -1, 10]", 10), *GRADIENTS, summed("d", "[16, 1, 0, 10]", "in 3")), "its operand was made by aten.convolution_backward"),
    ("y", (CONVOLVED.replace("(h,", "(x,").replace("[0, 1], [1, 1]", "[1, 1], [1, 1]"),), "aten.convolution reads beyond a rank's tile of dim 2 of x, and no halo brings it"),
    ("y", ('y: "f32[batch 2, in 3, height 16/cp, width 4]" = halo(x, ["cp"], 2, 16, [16, 2, 3, 8], 1.0)',), "it is declared a tile of 16 positions, and has windows of 8 elements and stride 2"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "lines", "why"), WRONG)
def test_the_line_that_lies_is_named(value: str, lines: tuple[str, ...], why: str) -> None:
    ((name, said),) = found(*lines)
    assert name == value and why in said, said


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        pooled = F.max_pool2d(self.first(images), 3, 2, 1)
        return F.avg_pool2d(self.last(pooled), 3, 2, 1, ceil_mode=True).mean((2, 3))


@pytest.fixture(scope="module")
def images() -> PlainProgram:
    model = Images()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)
    inputs = {"images": torch.randn(2, 3, 16, 6), "target": torch.tensor([0, 2])}
    return meshc.compile(step, meshc.Mesh("cp=2"), kwargs=inputs, plan="cp: height").compiled


WINDOW: Final = r"\[(\d+), (\d+), (-?\d+), (\d+)\]"
PLANTED: Final[list[tuple[str, int, Callable[[str], str]]]] = [
    ("halo", 6, lambda line: re.sub(WINDOW, lambda m: f"[{m[1]}, {m[2]}, {int(m[3]) + 1}, {m[4]}]", line)),
    ("halo", 6, lambda line: re.sub(WINDOW, lambda m: f"[{m[1]}, {m[2]}, {int(m[3]) - 1}, {m[4]}]", line)),
    ("halo", 6, lambda line: re.sub(r"\], (0.0|-inf)\)", "], 1.0)", line)),
    ("halo_sum", 3, lambda line: re.sub(WINDOW, lambda m: f"[{m[1]}, {m[2]}, {int(m[3]) + 1}, {m[4]}]", line)),
    ("halo_sum", 3, lambda line: re.sub(WINDOW, lambda m: f"[{m[1]}, {m[2]}, {int(m[3]) - 1}, {m[4]}]", line)),
]


@pytest.mark.parametrize(("function", "count", "change"), PLANTED)
def test_no_halo_of_a_step_can_be_changed(images: PlainProgram, function: str, count: int, change: Callable[[str], str]) -> None:
    check_program(images, "program.json", rules)
    planted = 0
    for place in range(count):

        def plant(lines: list[str], place: int = place) -> None:
            nonlocal planted
            halos = [number for number, line in enumerate(lines) if f" = {function}(" in line]
            assert len(halos) == count
            before = lines[halos[place]]
            lines[halos[place]] = change(before)
            planted += before != lines[halos[place]]

        told(images, plant)
    assert planted == count
