"""Numbers of layers as globs: they match these numbers and no others, and are few."""

from __future__ import annotations

import random
from fnmatch import fnmatchcase

from meshc.passes.planner.merge_layers import globs, merge_layers
from meshc.plan.plan import Plan


def test_a_stretch_of_layers_is_a_few_globs() -> None:
    assert globs(range(1, 31)) == ["[1-9]", "[12][0-9]", "30"]
    assert globs(range(1, 79)) == ["[1-9]", "[1-6][0-9]", "7[0-8]"]
    assert globs(range(1, 24, 2)) == ["[13579]", "1[13579]", "2[13]"]
    assert globs([0, 1, 3, 4, 5, 7]) == ["[013-57]"]
    assert globs([12]) == ["12"]


def test_they_match_what_they_have_to_and_nothing_else() -> None:
    draw = random.Random(0)
    for count in (5, 40, 130):
        for _ in range(20):
            numbers = {number for number in range(count) if draw.random() < 0.6} or {count}
            said = globs(numbers)
            assert {number for number in range(200) if any(fnmatchcase(str(number), one) for one in said)} == numbers


def test_lines_that_say_the_same_of_single_layers_are_one() -> None:
    texts = [
        "store layers.0.up: _, hidden/dp", "store layers.1.up: ffn/dp, _", "store layers.1.norm: hidden/dp", "store layers.2.up: ffn/dp, _",
        "store head: vocab/dp, _", "store layers.3.up state: ffn/dp, _",
    ]  # fmt: skip
    assert str(Plan.of((), (), merge_layers(Plan(texts).stores))).splitlines() == [
        "store layers.0.up: _, hidden/dp", "store layers.[12].up: ffn/dp, _", "store layers.1.norm: hidden/dp", "store head: vocab/dp, _",
        "store layers.3.up state: ffn/dp, _",
    ]  # fmt: skip
    pins = Plan([f"pin op:layers.{number}.norm/forward/mul.2: -/dp" for number in (1, 2, 3)]).operators
    assert [str(pin) for pin in merge_layers(pins)] == ["pin op:layers.[1-3].norm/forward/mul.2: -/dp"]
