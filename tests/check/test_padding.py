"""Padding: a type that says it is zero is believed where its line makes it so, and a sum takes none in that holds anything."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

import re
from typing import Final

import pytest

from meshc import rules
from meshc.check import check_program, sharding_walk
from meshc.text.parse import parse_stage
from tests import models
from tests.check.test_lies import names, told
from tests.golden.cases import CASES, train

SIZES = {"dp": 2, "tp": 2}
TEXT = """@ranks("dp=2,tp=2")
def main(
    x: "f32[batch 5/dp, width 8]" = "input:x",
    e: "f32[batch 6/dp, width 8]" = "input:e",
    w: "f32[batch 5, width 8]" = "input:w",
    s: "f32[batch 5, width 8] partial(sum: dp)" = "input:s",
    i: "i64[batch 5/dp]" = "input:i",
    u: "f32[vocab 7/dp/tp, width 8]" = "input:u",
    h: "f32[heads 1/dp, width 8]" = "input:h",
):
    c: "int" = coordinate("dp")
    d: "int" = coordinate("tp")
    n: "int" = tile_count(5, [2], [c])
    b: "int" = tile_start(5, [2], [c])
    k: "int" = tile_count(6, [2], [c])
    one: "int" = tile_count(1, [2], [c])
    two: "int" = tile_count(2, [2], [c])
    v: "f32[1, 1, 8]" = aten.reshape(h, [1, 1, 8])
    l: "int" = tile_count(7, [2, 2], [c, d])
    LINES
    return {
        "output:x": x,
    }
"""
ZERO: Final = ('z: "f32[batch 5/dp, width 8] pad(zero: 0.0)" = shard(w, 0, 2, c)',)
MASKED: Final = ('m: "f32[3, 8]" = mask(x, 0, n, 0.0)',)
LOW: Final = ('m: "f32[3, 8]" = mask(x, 0, n, -inf)',)
FILLED: Final = ('f: "f32[6, 8]" = aten.constant_pad_nd(s, [0, 0, 0, 1], 0)',)
ONES: Final = ('f: "f32[6, 8]" = aten.constant_pad_nd(s, [0, 0, 0, 1], 1)',)


def found(*lines: str) -> list[tuple[str, str]]:
    return list(sharding_walk.faults(parse_stage(TEXT.replace("LINES", "\n    ".join(lines))), SIZES, rules))


SOUND = [
    (*ZERO, 'y: "f32[width 8] partial(sum: dp)" = aten.sum.dim_IntList(z, [0])'),
    (*ZERO, 't: "f32[width 8, batch 5/dp] pad(zero: 1.0)" = aten.t(z)', 'y: "f32[width 8] partial(sum: dp)" = aten.sum.dim_IntList(t, [1])'),
    (*MASKED, 'y: "f32[width 8] partial(sum: dp)" = aten.sum.dim_IntList(m, [0])'),
    (*MASKED, 'y: "f32[width 8, batch 5/dp] pad(zero: 1.0)" = aten.t(m)'),
    (*LOW, 'y: "f32[width 8] partial(max: dp)" = aten.amax(m, [0])'),
    ('y: "f32[width 8] partial(sum: dp)" = aten.sum.dim_IntList(e, [0])',),
    (*FILLED, 'y: "f32[batch 5/dp, width 8] pad(zero: 0.0)" = reduce_scatter(f, ["dp"], 0, "sum")'),
    ('y: "f32[batch 6/dp, width 8] pad(zero: 0.0)" = aten.relu(e)',),  # there is none
    ('m: "f32[1, 1, 8]" = mask(v, 1, one, 0.0)', 'y: "f32[heads 1/dp, width 8] pad(zero: 0.0)" = aten.reshape(m, [1, 8])'),
]  # fmt: skip


@pytest.mark.parametrize("lines", SOUND)
def test_sound_lines_are_let_through(lines: tuple[str, ...]) -> None:
    assert found(*lines) == []


CLAIM = "its type says that the padding of [batch 5/dp] is zero; as its line makes it, it holds anything"
TAKEN = "it takes the padding of"
WRONG = [
    (('y: "f32[batch 5/dp, width 8] pad(zero: 0.0)" = aten.neg(x)',), CLAIM),
    ((*ZERO, 'y: "f32[batch 5/dp, width 8] pad(zero: 0.0)" = aten.add.Tensor(z, 1)'), CLAIM),
    ((*LOW, 'y: "f32[width 8, batch 5/dp] pad(zero: 1.0)" = aten.t(m)'), CLAIM),
    ((*ONES, 'y: "f32[batch 5/dp, width 8] pad(zero: 0.0)" = reduce_scatter(f, ["dp"], 0, "sum")'), CLAIM),
    (('y: "f32[vocab 7/dp, width 8] pad(zero: 0.0)" = all_gather(u, ["tp"], 0)',), "its type says that the padding of [vocab 7/dp] is zero"),
    (('y: "f32[width 8] partial(sum: dp)" = aten.sum.dim_IntList(x, [0])',), f"{TAKEN} x in, which is [batch 5/dp] and holds anything there: mask it with 0.0"),
    (('y: "f32[1, 8]" = aten.amax(x, [0], True)',), f"{TAKEN} x in, which is [batch 5/dp] and holds anything there: mask it with -inf"),
    ((*ZERO, 'y: "f32[width 8] partial(max: dp)" = aten.amax(z, [0])'), f"{TAKEN} z in, which is [batch 5/dp] and holds anything there: mask it with -inf"),
    ((*LOW, 'y: "f32[width 8] partial(sum: dp)" = aten.sum.dim_IntList(m, [0])'), f"{TAKEN} m in"),
    (('y: "f32[3, 8]" = mask(x, 0, k, 0.0)',), "it counts the real positions of a tile of 6 over dp along dim 0 of its operand, which is [batch 5/dp]"),
    (('y: "f32[3, 8]" = mask(x, 0, l, 0.0)',), "it counts the real positions of a tile of 7 over dp/tp along dim 0 of its operand"),
    (('y: "f32[1, 1, 8]" = mask(v, 1, two, 0.0)',), "it counts the real positions of a tile of 2 over dp, and dp splits 1 of its operand's"),
    (('y: "f32[2, 8]" = mask(u, 0, n, 0.0)',), "it counts the real positions of a tile of 5 over dp along dim 0 of its operand, which is [vocab 7/dp/tp]"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "why"), WRONG)
def test_the_line_that_lies_is_named(lines: tuple[str, ...], why: str) -> None:
    ((name, said),) = found(*lines)
    assert name == "y" and why in said, said


def test_a_mask_that_counts_nothing_makes_nothing_zero() -> None:
    said = found('m: "f32[3, 8]" = mask(x, 0, b, 0.0)', 'y: "f32[width 8, batch 5/dp] pad(zero: 1.0)" = aten.t(m)')
    assert [name for name, _ in said] == ["y"] and CLAIM in said[0][1]


def test_a_mask_that_is_gone_is_told() -> None:
    """Five rows over two ranks: the sixth is none, and goes into no sum."""
    made = train(models.mlp(batch=5, width=20), "dp=2", sgd=True).compiled

    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if " = mask(" in line)
        mask, operand = re.findall(r"(\w+): .* = mask\((\w+),", lines[at])[0]
        del lines[at]
        lines[at:] = [re.sub(rf"\b{mask}\b(?!\()", operand, line) for line in lines[at:]]

    check_program(made, "program.json", rules)
    said, _ = told(made, change)
    assert "and holds anything there: mask it with 0.0" in said, said


def test_what_comes_in_is_zero_where_who_gives_it_says_so() -> None:
    key = '"state:up.bias/momentum_buffer"'

    def change(lines: list[str]) -> None:
        at = next(number for number, line in enumerate(lines) if line.strip().startswith("up_bias_momentum_buffer:"))
        assert key in lines[at], lines[at]
        lines[at] = lines[at].replace('ffn 20/dp]"', 'ffn 20/dp] pad(zero: 0.0)"', 1)

    said, lines = told(CASES["mlp zero2 uneven"]().compiled, change)
    assert names(said, lines, "up_bias_momentum_buffer:"), said
    assert "its type says that the padding of [ffn 20/dp] is zero, which nothing says that gives state:up.bias" in said
