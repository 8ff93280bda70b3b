"""Numbers that are followed: whatever is made of them is recomputed at other values, and whatever was asked of them is asked again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from meshc.ir import comparison_key
from meshc.ir.trail import Trail, TrailMismatch, answer, compute_tracked, is_tracked, largest, smallest


def put(trail: Trail, number: Any, *values: float) -> Any:
    """What a followed number is at other values."""
    return trail.at(values)[number.place]


def test_what_is_made_is_recomputed() -> None:
    trail = Trail()
    n = trail.number(768)
    made_of_it = {
        "bytes": math.prod((4, n, 8)) * 2, "tiles": -(-n // 5), "share": 1 / n, "sum": sum([n, n, 3]), "rest": 1000 - n, "mod": n % 7,
        "up": math.ceil(n / 7), "near": round(0.1 * n), "abs": abs(5 - n), "largest": largest(100, n), "smallest": smallest(n, 800),
    }  # fmt: skip
    for m in (768, 896, 31):
        wanted = {
            "bytes": 64 * m, "tiles": -(-m // 5), "share": 1 / m, "sum": 2 * m + 3, "rest": 1000 - m, "mod": m % 7, "up": math.ceil(m / 7),
            "near": round(0.1 * m), "abs": abs(5 - m), "largest": max(100, m), "smallest": min(m, 800),
        }  # fmt: skip
        assert {name: put(trail, number, m) for name, number in made_of_it.items()} == wanted


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: n > 600, lambda n: 600 < n, lambda n: n == 768, lambda n: n != 599, lambda n: n * 2 >= 1300, lambda n: 1300 <= n * 2,
        lambda n: bool(n // 600), lambda n: max(600, n), lambda n: sorted([600, n]), lambda n: 768 in (1, n),
        lambda n: {768: 1}[n], lambda n: (n, 1) == (768, 1),
    ],
)  # fmt: skip
def test_what_is_asked_is_asked_again(ask: Callable[[Any], object]) -> None:
    """At 599 each has another answer."""
    trail = Trail()
    ask(trail.number(768))
    assert trail.at([768])
    with pytest.raises(TrailMismatch):
        trail.at([599])


@pytest.mark.parametrize(
    "use",
    [
        str, repr, int, float, lambda n: f"{n:,}", lambda n: f"{n}", lambda n: list(range(n)), lambda n: [0] * n, lambda n: [0, 1, 2, 3][n],
        lambda n: np.array([n], dtype=np.int64), lambda n: np.fromiter([n], np.int32), lambda n: math.sqrt(n), lambda n: bin(n),
        lambda n: round(n / 3, 2), lambda n: "abcd"[:n],
    ],
)  # fmt: skip
def test_who_takes_the_plain_value_ties_it(use: Callable[[Any], object]) -> None:
    """Nothing in Python or C gets at the value without the trail: such a program serves this size alone."""
    trail = Trail()
    use(trail.number(3))
    assert trail.at([3])
    with pytest.raises(TrailMismatch):
        trail.at([2])


def test_plain_floats_on_the_left_lose_nothing() -> None:
    trail = Trail()
    n = trail.number(6)
    half, scaled = 0.5 * n, 2.0**-1 * (n / 4)
    assert is_tracked(half) and is_tracked(scaled)
    assert (put(trail, half, 10), put(trail, scaled, 10)) == (5.0, 1.25)


def test_a_number_counts_as_what_it_is() -> None:
    trail = Trail()
    n, x = trail.number(6), trail.number(0.5)
    assert isinstance(n, int) and isinstance(x, float) and isinstance(n, int | float)
    assert not isinstance(n, str) and not isinstance(x, int)
    assert (
        comparison_key([1, True, 1.0]) != comparison_key([1, 1, 1.0])
        and comparison_key((0.0,)) != comparison_key((-0.0,))
        and comparison_key([1]) != comparison_key((1,))
    )
    assert comparison_key([n, 2]) == comparison_key([6, 2])
    with pytest.raises(TrailMismatch):
        trail.at([7, 0.5])


def test_numbers_that_were_told_apart_stay_apart() -> None:
    trail = Trail()
    n, m = trail.number(6), trail.number(8)
    assert len({n: 1, m: 2}) == 2
    assert trail.at([7, 9], plain=[3])
    for values, plain in (([7, 7], []), ([7, 9], [9])):
        with pytest.raises(TrailMismatch, match="were two numbers"):
            trail.at(values, plain)


def test_a_function_is_asked_of_many_at_once() -> None:
    def order(*numbers: float) -> list[int]:
        return sorted(range(len(numbers)), key=numbers.__getitem__)

    trail = Trail()
    row = [trail.number(5), trail.number(2), 3]
    assert answer(order, *row) == [1, 2, 0] and answer(order, 5, 2, 3) == [1, 2, 0]
    double = compute_tracked(lambda one, other: one * 2 + other, row[0], 1)
    assert put(trail, double, 50, 1) == 101
    with pytest.raises(TrailMismatch):
        trail.at([2, 1])


def test_a_quotient_that_is_none_is_no_answer() -> None:
    trail = Trail()
    n = trail.number(6)
    assert 12 / (n - 2) == 3.0
    with pytest.raises(TrailMismatch):
        trail.at([2])


@pytest.mark.parametrize("seed", range(20))
def test_a_program_of_numbers_does_the_same_or_says_so(seed: int) -> None:
    """Sums, products and quotients at random, with branches: at other sizes what comes of it is what running it there gives."""

    def run(n: Any, m: Any) -> list[Any]:
        rng, row = random.Random(seed), [n, m, 7, 0.25]
        for _ in range(40):
            one, other = rng.choice(row), rng.choice(row)
            kind = rng.randrange(6)
            if kind == 0:
                row.append(one + other)
            elif kind == 1:
                row.append(one - 3 * other)
            elif kind == 2 and abs(one) < 1e6 and abs(other) < 1e6:
                row.append(one * other)
            elif kind == 3:
                row.append(one // 3 if one > other else other / 2)
            elif kind == 4:
                row.append(largest(one, other))
            else:
                row.append(sum(row[-3:]))
        return row

    trail = Trail()
    found, served = run(trail.number(12), trail.number(20)), 0
    for n, m in ((12, 20), (13, 20), (24, 40), (100, 150), (20, 12), (1, 3)):
        try:
            steps = trail.at([n, m])
        except TrailMismatch:
            continue
        served += 1
        got = [steps[one.place] if is_tracked(one) else one for one in found]
        assert got == run(n, m) and list(map(type, got)) == list(map(type, run(n, m)))
    assert served >= 1
