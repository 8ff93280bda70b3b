"""Series: names that go on from block to block."""

from __future__ import annotations

import pytest

from meshc.passes.depth.copies import Series
from meshc.passes.depth.unequal import Unequal

LAYERS = [("parameter:h.1.fc1.weight", "parameter:h.2.fc1.weight"), ("buffer:table", "buffer:table")]


def test_copies_go_on_by_the_number_in_which_two_blocks_differ() -> None:
    assert Series(LAYERS, 5).copy(*LAYERS[0], 3) == "parameter:h.4.fc1.weight"
    assert Series(LAYERS, 5).copy(*LAYERS[1], 3) == "buffer:table"
    assert Series([("output:cache.0.1", "output:cache.0.2")], 5).copy("output:cache.0.1", "output:cache.0.2", 1) == "output:cache.0.2"


def test_what_stands_behind_the_copies_is_as_many_further_on() -> None:
    series = Series(LAYERS, 5)
    names = ["h.0.fc1.weight", "h.1.fc1.weight", "h.2.fc1.weight", "h.3.fc2.weight", "fc3"]
    later = [series.later(f"parameter:{name}").removeprefix("parameter:") for name in names]
    assert later == ["h.0.fc1.weight", "h.1.fc1.weight", "h.7.fc1.weight", "h.8.fc2.weight", "fc3"]


def test_blocks_of_two_layers_go_on_by_two() -> None:
    series = Series([("h.2.w", "h.4.w"), ("h.3.w", "h.5.w")], 3)
    assert (series.copy("h.3.w", "h.5.w", 2), series.later("h.4.w"), series.later("h.3.w")) == ("h.7.w", "h.10.w", "h.3.w")


@pytest.mark.parametrize("pair", [("h.1.w", "h.2.v"), ("h.1.w.1", "h.2.w.2"), ("h.2.w", "h.1.w")])
def test_names_that_do_not_go_on_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(Unequal):
        Series([pair], 1)
