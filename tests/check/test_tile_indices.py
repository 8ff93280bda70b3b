"""Reading, adding and writing by an index where a rank has a tile of the rows: the tile's own start, count and mask, or the line is refused."""

# ruff: noqa: E501 - a line a case
from __future__ import annotations

from typing import Final

import pytest

from meshc import rules
from meshc.check import indices
from meshc.text.parse import parse_stage

SIZES: Final = {"dp": 2, "tp": 2}
TEXT: Final = """@ranks("dp=2,tp=2")
def main(
    w: "f32[vocab 10/tp, width 6]" = "input:w",
    e: "f32[vocab 10, width 6]" = "input:e",
    x: "f32[batch 8/dp, vocab 10/tp]" = "input:x",
    u: "f32[batch 8, vocab 9/dp/tp]" = "input:u",
    i: "i64[batch 8/dp]" = "input:i",
    j: "i64[batch 8]" = "input:j",
    g: "f32[batch 8/dp, width 6]" = "input:g",
    q: "i64[batch 8/dp, one 1]" = "input:q",
):
    c: "int" = coordinate("dp")
    d: "int" = coordinate("tp")
    start: "int" = tile_start(10, [2], [d])
    count: "int" = tile_count(10, [2], [d])
    dp_start: "int" = tile_start(10, [2], [c])
    dp_count: "int" = tile_count(10, [2], [c])
    longer: "int" = tile_start(12, [2], [d])
    both: "int" = tile_start(9, [2, 2], [c, d])
    both_count: "int" = tile_count(9, [2, 2], [c, d])
    LINES
    return {
        "output:x": x,
    }
"""
PLACE: Final = """
s: "i64[4]" = aten.sub.Tensor(i, start)
a: "b8[4]" = aten.ge.Scalar(s, 0)
b: "b8[4]" = aten.lt.Scalar(s, count)
m: "b8[4]" = aten.logical_and(a, b)
p: "i64[4]" = aten.mul.Tensor(s, m)
"""
READ: Final = f"""{PLACE}
r: "f32[4, 6]" = aten.embedding(w, p)
n: "b8[4, 1]" = aten.unsqueeze(m, -1)
y: "f32[batch 8/dp, width 6] partial(sum: tp)" = aten.where.ScalarOther(n, r, 0.0)
"""
ADDED: Final = f"""{PLACE}
n: "b8[4, 1]" = aten.unsqueeze(m, -1)
h: "f32[4, 6]" = aten.where.ScalarOther(n, g, 0.0)
y: "f32[vocab 10/tp, width 6] partial(sum: dp)" = aten.embedding_dense_backward(h, p, 5, -1, False)
"""
GATHERED: Final = """
s: "i64[4, 1]" = aten.sub.Tensor(q, start)
a: "b8[4, 1]" = aten.ge.Scalar(s, 0)
b: "b8[4, 1]" = aten.lt.Scalar(s, count)
m: "b8[4, 1]" = aten.logical_and(a, b)
p: "i64[4, 1]" = aten.mul.Tensor(s, m)
r: "f32[4, 1]" = aten.gather(x, 1, p)
y: "f32[batch 8/dp, one 1] partial(sum: tp)" = aten.where.ScalarOther(m, r, 0)
"""
WRITTEN: Final = """
neg: "b8[8]" = aten.lt.Scalar(j, 0)
up: "i64[8]" = aten.add.Tensor(j, 10)
all: "i64[8]" = aten.where.self(neg, up, j)
s: "i64[8]" = aten.sub.Tensor(all, start)
a: "b8[8]" = aten.ge.Scalar(s, 0)
b: "b8[8]" = aten.lt.Scalar(s, count)
m: "b8[8]" = aten.logical_and(a, b)
p: "i64[8]" = aten.where.ScalarOther(m, s, 5)
z: "f32[1, 6]" = aten.slice.Tensor(w, 0, 0, 1)
l: "f32[6, 6]" = aten.cat([w, z], 0)
f: "f32[6, 6]" = aten.index_fill.int_Scalar(l, 0, p, 0.0)
y: "f32[vocab 10/tp, width 6]" = aten.slice.Tensor(f, 0, 0, 5)
"""
TAKEN: Final = """
y: "f32[batch 8/dp] partial(sum: tp)" = meshc.take(x, i, -100, start)
z: "f32[batch 8/dp, vocab 10/tp]" = meshc.take_backward(y, i, -100, 5, start)
o: "i64[batch 8/dp, vocab 10/tp]" = meshc.one_hot(i, 5, start)
"""
TAKEN_OF_BOTH: Final = """
s: "i64[8]" = aten.sub.Tensor(j, both)
b: "b8[8]" = aten.lt.Scalar(s, both_count)
k: "i64[8]" = aten.where.ScalarOther(b, j, -100)
y: "f32[batch 8] partial(sum: dp, sum: tp)" = meshc.take(u, k, -100, both)
"""


def found(text: str) -> list[tuple[str, str, str]]:
    stage = parse_stage(TEXT.replace("LINES", "\n    ".join(text.strip().splitlines())))
    return list(indices.faults({"main": stage}, SIZES, rules))


MOVED: Final = f"""
k: "i64[batch 8/dp]" = aten.add.Tensor(i, 3)
{READ.replace("(i, start)", "(k, start)")}"""
"""An index that the model has computed."""


@pytest.mark.parametrize("text", [READ, MOVED, ADDED, GATHERED, WRITTEN, TAKEN, TAKEN_OF_BOTH])
def test_what_goes_by_its_own_tile_is_let_through(text: str) -> None:
    assert found(text) == []


CHANGED: Final = [
    # another tile's start, end or mask
    (READ, "(i, start)", "(i, dp_start)", "r", "p is no place in a rank's tile, and w is [vocab 10/tp] there"),
    (READ, "(i, start)", "(i, longer)", "r", "p is no place in a rank's tile"),
    (READ, "(i, start)", "(i, count)", "r", "p is no place in a rank's tile"),
    (READ, "(s, count)", "(s, dp_count)", "r", "p is no place in a rank's tile"),
    (READ, "(s, count)", "(s, 6)", "r", "p is no place in a rank's tile"),
    (READ, "ge.Scalar(s, 0)", "ge.Scalar(s, 1)", "r", "p is no place in a rank's tile"),
    (READ, "logical_and(a, b)", "logical_and(b, b)", "r", "p is no place in a rank's tile"),
    (READ, "logical_and(a, b)", "logical_or(a, b)", "r", "p is no place in a rank's tile"),
    (READ, "(w, p)", "(w, s)", "r", "s is no place in a rank's tile"),
    (READ, "(w, p)", "(w, i)", "r", "i is no place in a rank's tile"),
    (READ, "(w, p)", "(e, p)", "r", "p is a place in a tile of 10 over tp, and e is [vocab 10] there"),
    (READ, "(n, r, 0.0)", "(n, r, 1.0)", "y", "r has any row where an index points into another rank's tile, and aten.where.ScalarOther takes it as it is: mask it"),
    (READ, "aten.where.ScalarOther(n, r, 0.0)", "aten.relu(r)", "y", "r has any row where an index points into another rank's tile, and aten.relu takes it as it is: mask it"),
    (READ, "aten.where.ScalarOther(n, r, 0.0)", "aten.clone(r)", "y", "r has any row where an index points into another rank's tile, and aten.clone takes it as it is: mask it"),
    (READ, "aten.unsqueeze(m, -1)", "aten.unsqueeze(a, -1)", "y", "n does not say where that is"),
    (GATHERED, "(q, start)", "(q, dp_start)", "r", "p is no place in a rank's tile, and x is [vocab 10/tp] there"),
    (GATHERED, "(m, r, 0)", "(a, r, 0)", "y", "a does not say where that is"),
    (READ, '"b8[4, 1]" = aten.unsqueeze(m, -1)', '"b8[1, 4]" = aten.unsqueeze(m, 0)', "y", "n does not say where that is"),
    (ADDED, '"b8[4, 1]" = aten.unsqueeze(m, -1)', '"b8[1, 4]" = aten.unsqueeze(m, 0)', "y", "it adds what h has for rows of other ranks"),
    (ADDED, "(i, start)", "(i, dp_start)", "y", "p is no place in a rank's tile, and y is [vocab 10/tp] there"),
    (ADDED, "(h, p, 5", "(g, p, 5", "y", "it adds what g has for rows of other ranks to the first of its own: mask g"),
    (ADDED, "aten.unsqueeze(m, -1)", "aten.unsqueeze(b, -1)", "y", "it adds what h has for rows of other ranks to the first of its own: mask h"),
    (WRITTEN, "(all, start)", "(all, dp_start)", "f", "p is no place in a rank's tile"),
    (WRITTEN, "(all, start)", "(up, start)", "f", "p is no place in a rank's tile"),
    (WRITTEN, "(j, 10)", "(j, 5)", "s", "all counts from the end of 5 rows, and start is the start of a tile of 10 over tp"),
    (WRITTEN, "(m, s, 5)", "(m, s, 0)", "f", "p is 0 for rows of other ranks, and not 5"),
    (WRITTEN, "(f, 0, 0, 5)", "(f, 0, 1, 6)", "y", "f has a row behind its tile for what is written to other ranks' rows: it is to be cut off"),
    # an operator that is told where its tile starts
    (TAKEN, "(x, i, -100, start)", "(x, i, -100, dp_start)", "y", "dp_start is the start of a tile of 10 over dp, and x is [vocab 10/tp] there"),
    (TAKEN, "(x, i, -100, start)", "(x, i, -100, longer)", "y", "longer is the start of a tile of 12 over tp, and x is [vocab 10/tp] there"),
    (TAKEN, "(x, i, -100, start)", "(x, i, -100, 0)", "y", "0 is no start of its tile, and x is [vocab 10/tp] there"),
    (TAKEN, "(x, i, -100, start)", "(x, i, -100, count)", "y", "count is no start of its tile"),
    (TAKEN, "(y, i, -100, 5, start)", "(y, i, -100, 5, dp_start)", "z", "dp_start is the start of a tile of 10 over dp, and z is [vocab 10/tp] there"),
    (TAKEN, "(i, 5, start)", "(i, 5, longer)", "o", "longer is the start of a tile of 12 over tp"),
    (TAKEN_OF_BOTH, "(u, k, ", "(u, j, ", "y", "j may point behind a tile of 9 over dp/tp into its padding: it is to be -100 there"),
    (TAKEN_OF_BOTH, "(b, j, -100)", "(b, j, 0)", "y", "k may point behind a tile of 9 over dp/tp into its padding: it is to be -100 there"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "old", "new", "value", "why"), CHANGED)
def test_what_goes_by_another_tile_is_named(text: str, old: str, new: str, value: str, why: str) -> None:
    assert old in text
    told = found(text.replace(old, new))
    assert told and told[0][1] == value and why in told[0][2], told
