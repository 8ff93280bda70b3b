"""What is sooner than numpy's own says the same."""

from __future__ import annotations

import numpy as np
import pytest

from meshc.passes.planner.unique_numbers import membership_mask, unique_with_inverse


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_numbers_in_order_and_where_each_stands(count: int) -> None:
    numbers = np.random.default_rng(count).integers(0, 12, count)
    said, place = unique_with_inverse(numbers)
    assert said.tolist() == sorted(set(numbers.tolist()))
    assert said[place].tolist() == numbers.tolist()


def test_of_no_numbers_there_are_none() -> None:
    said, place = unique_with_inverse(np.zeros(0, dtype=np.intp))
    assert len(said) == len(place) == 0


def test_marks() -> None:
    assert membership_mask(5, np.array([3, 1, 3])).tolist() == [False, True, False, True, False]
    assert not membership_mask(3, np.zeros(0, dtype=np.intp)).any()
