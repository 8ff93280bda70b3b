"""Which rank an expert belongs on."""

from __future__ import annotations

import itertools
import random

import pytest

from meshc.cost.expert_balance import balanced, imbalance, sizes_of


def ranks(slots: list[int], experts: int, groups: int) -> list[set[int]]:
    each = -(-experts // groups)
    return [{expert for expert, slot in enumerate(slots) if slot // each == group} for group in range(groups)]


def test_the_longest_first() -> None:
    slots = balanced([9, 7, 2, 1], [0, 1, 2, 3], 2)
    assert ranks(slots, 4, 2) == [{0, 3}, {1, 2}] and slots == [0, 3, 2, 1], "who stays on a rank stays in its slot"
    assert imbalance([9, 7, 2, 1], [0, 1, 2, 3], 2) == pytest.approx(16 / 9.5)
    assert imbalance([9, 7, 2, 1], slots, 2) == pytest.approx(10 / 9.5)


def test_groups_change_names_where_that_moves_less() -> None:
    assert ranks(balanced([1, 1, 9, 9], [3, 1, 2, 0], 2), 4, 2) == [{1, 3}, {0, 2}]


def test_nothing_to_do_is_even() -> None:
    assert imbalance([0, 0, 0], [0, 1, 2], 3) == 1.0 and sorted(balanced([0, 0, 0, 0], [2, 3, 0, 1], 2)) == [0, 1, 2, 3]


@pytest.mark.parametrize("experts, groups, sizes", [(8, 3, [3, 3, 2]), (4, 3, [2, 2, 0]), (6, 2, [3, 3]), (5, 1, [5])])
def test_every_rank_keeps_as_many_as_it_has(experts: int, groups: int, sizes: list[int]) -> None:
    assert sizes_of(experts, groups) == sizes
    draw = random.Random(experts)
    slots = [*range(experts)]
    for _ in range(50):
        loads = [draw.choice((0.0, 1.0, draw.expovariate(1.0))) for _ in range(experts)]
        slots = balanced(loads, slots, groups)
        assert sorted(slots) == [*range(experts)] and [len(one) for one in ranks(slots, experts, groups)] == sizes


def test_close_to_the_best_of_all() -> None:
    """Of 8 experts on 2 ranks of 4, all 70 ways are tried."""
    draw = random.Random(0)
    for _ in range(100):
        loads = [draw.expovariate(1.0) for _ in range(8)]
        total = sum(loads)
        best = min(max(sum(half), total - sum(half)) for half in itertools.combinations(loads, 4))
        found = imbalance(loads, balanced(loads, [*range(8)], 2), 2) * total / 2
        assert best - 1e-12 <= found <= 4 / 3 * best
