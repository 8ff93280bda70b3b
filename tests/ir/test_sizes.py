"""Sizes that remember their expression: arithmetic, text and back, other sizes put in."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshc.errors import ArtifactError
from meshc.ir.sizes import Dynamic, Ratio, Size, at, hint_for, parse, symbol, worlds

BATCH, SEQ = Dynamic("batch", 2, 64, 11), Dynamic("seq", 2, 512, 37)
HINTS = {"n_batch": 11, "n_seq": 37}
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


@st.composite
def trees(draw: st.DrawFn, depth: int = 4) -> Any:
    """An expression as data: a symbol, a number, or (sign, left, right); divisors are numbers, as in programs."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["n_batch", "n_seq", 1, 2, 3, 5]))
    sign = draw(st.sampled_from(list(OPERATORS)))
    right = draw(st.integers(1, 6)) if sign in ("//", "%") else draw(trees(depth - 1))
    return sign, draw(trees(depth - 1)), right


def value(tree: Any, names: dict[str, Any]) -> Any:
    if isinstance(tree, tuple):
        return OPERATORS[tree[0]](value(tree[1], names), value(tree[2], names))
    return names.get(tree, tree)


@given(trees(), st.integers(2, 64), st.integers(2, 512))
def test_a_size_is_what_python_computes_at_any_sizes(tree: Any, batch: int, seq: int) -> None:
    size = value(tree, {"n_batch": symbol(BATCH), "n_seq": symbol(SEQ)})
    sizes = {"n_batch": batch, "n_seq": seq}
    assert int(size) == value(tree, HINTS)
    assert at(size, sizes) == value(tree, sizes)
    assert at(parse(str(size), HINTS), sizes) == value(tree, sizes)
    assert eval(str(size), dict(sizes)) == value(tree, sizes)


@given(trees())
def test_its_text_is_read_back_as_the_same_text(tree: Any) -> None:
    size = value(tree, {"n_batch": symbol(BATCH), "n_seq": symbol(SEQ)})
    assert str(parse(str(size), HINTS)) == str(size)


def test_how_sizes_are_written() -> None:
    n, s = symbol(BATCH), symbol(SEQ)
    assert str(-(-n // 2)) == "-(-n_batch // 2)"
    assert str(prod([-(-n // 2), s, 16])) == "16 * n_seq * -(-n_batch // 2)"
    assert str(s + 1) == "n_seq + 1" and str((n * s * 64) // 64) == "n_batch * n_seq"
    assert str(1 / n) == "1 / n_batch" and isinstance(1 / n, Ratio) and float(1 / n) == 1 / 11
    assert type(n - n) is int and type(2 * n // n) is int
    assert str(2.0 * (1 / n)) == "2.0 / n_batch"


def test_a_size_is_an_integer_to_everybody_else() -> None:
    n = symbol(BATCH)
    assert isinstance(n, int) and n == 11 and hash(n) == hash(11) and [0] * n == [0] * 11
    assert torch.zeros([n, 2]).shape == (11, 2)
    assert n != Size(11, symbol(SEQ).expr), "two sizes are equal if their expressions are"
    assert f"{n}" == "n_batch" and f"{n:,}" == "11"


@pytest.mark.parametrize(
    "text", ["n_other", "f(n_batch)", "n_batch if 1 else 2", "__import__('os')", "n_batch ** n_seq", "1 // 0", "'a'", ""]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="is no size"):
        parse(text, HINTS)


def test_what_stands_for_a_size_fits_nothing_else() -> None:
    assert hint_for(8, 2, 64, set(), set(), 4) == 5 and hint_for(8, 2, 64, set(), set(), 1) == 7, "tiles of 3, then 2; of 7, 4 and 2 evenly"
    assert hint_for(8, 2, 64, set(), {64, 15}, 4) == 13, "5 divides 15"
    assert hint_for(8, 2, 64, {5}, set(), 4) == 13 and hint_for(8, 2, 64, set(), set(), 7) == 29
    assert hint_for(64, 2, 64, set(), set(), 4) == 61 and hint_for(8, 8, 64, set(), set(), 4) == 13, "from the range if there is one"
    assert hint_for(8, 6, 8, set(), set(), 4) == 13, "or else above it"
    assert hint_for(3, 2, 4, set(), set(), 8) == 17, "over the pieces a plan may cut, and uneven at each cut: 9, 5, 3"


def test_worlds_differ_in_every_size_and_in_step() -> None:
    found = worlds([BATCH, SEQ, Dynamic("tight", 2, 14, 13)])
    assert found[0] == {"n_batch": 11, "n_seq": 37, "n_tight": 13}
    for name in found[0]:
        values = [world[name] for world in found]
        assert len(set(values)) == len(values) and {value % 2 for value in values} == {0, 1}
    assert len({world["n_seq"] - world["n_batch"] for world in found}) > 3
    assert max(world["n_tight"] for world in found) <= 14
