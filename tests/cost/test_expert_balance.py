"""Which rank an expert belongs on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from meshc.cost.expert_balance import ExpertPlacement, balance_experts, imbalance, sizes_of


def ranks(slots: Sequence[int], experts: int, groups: int) -> list[set[int]]:
    each = -(-experts // groups)
    return [{expert for expert, slot in enumerate(slots) if slot // each == group} for group in range(groups)]


def lie(*slots: int, copies: Sequence[int] = ()) -> ExpertPlacement:
    return ExpertPlacement(slots, tuple(copies))


def test_the_longest_first() -> None:
    found = balance_experts([9, 7, 2, 1], lie(0, 1, 2, 3), 2)
    assert ranks(found.slots, 4, 2) == [{0, 3}, {1, 2}] and found == lie(0, 3, 2, 1), "who stays on a rank stays in its slot"
    assert imbalance([9, 7, 2, 1], lie(0, 1, 2, 3), 2) == pytest.approx(16 / 9.5)
    assert imbalance([9, 7, 2, 1], found, 2) == pytest.approx(10 / 9.5)


def test_groups_change_names_where_that_moves_less() -> None:
    assert ranks(balance_experts([1, 1, 9, 9], lie(3, 1, 2, 0), 2).slots, 4, 2) == [{1, 3}, {0, 2}]


def test_nothing_to_do_is_even() -> None:
    assert imbalance([0, 0, 0], lie(0, 1, 2), 3) == 1.0
    assert sorted(balance_experts([0, 0, 0, 0], lie(2, 3, 0, 1, copies=(-1, -1)), 2, 1).slots) == [0, 1, 2, 3]


def test_what_has_most_to_do_is_divided() -> None:
    """By hand: of 12 expert 0 has 9, and each rank does half of that; of 1, 1 and 1 one on each, and a half of the third."""
    loads = [9, 1, 1, 1]
    found = balance_experts(loads, lie(0, 1, 2, 3, copies=(-1, -1)), 2, 1)
    assert found == lie(0, 3, 2, 1, copies=(3, 0)) and imbalance(loads, found, 2) == 1.0
    assert imbalance(loads, lie(0, 1, 2, 3, copies=(-1, 0)), 2) == pytest.approx(6.5 / 6)
    assert found.spare(2) == 1 and lie(0, 1).spare(2) == 0
    assert balance_experts(loads, found, 2, 1) == found, "where nothing has changed nothing changes"
    assert balance_experts(loads, found, 2, 0).copies == (-1, -1), "places that may not be used are empty"
    assert balance_experts([1, 1, 1, 1], lie(0, 1, 2, 3, copies=(-1, -1)), 2, 1).copies == (-1, -1), (
        "nor are those that would not help used"
    )


def test_groups_share_what_an_expert_has_to_do() -> None:
    """By hand: expert 0 on ranks 0, 1 and 2 has 6, 2 each; experts 1, 2, 3 have 1 each."""
    assert imbalance([6, 1, 1, 1], lie(0, 1, 2, 3, copies=(-1, 0, 0, -1)), 4) == pytest.approx(3 / (9 / 4))


def test_copies_never_lie_where_their_expert_does() -> None:
    draw = random.Random(3)
    for experts, groups, spare in ((8, 3, 1), (8, 4, 2), (4, 4, 3), (5, 2, 1)) * 20:
        loads = [draw.choice((0.0, 1.0, draw.expovariate(0.2))) for _ in range(experts)]
        start = lie(*draw.sample(range(experts), experts), copies=[-1] * (groups * spare))
        found = balance_experts(loads, start, groups, spare)
        assert sorted(found.slots) == [*range(experts)]
        assert all(len(set(having)) == len(having) for having in found.groups_of(groups))
        assert imbalance(loads, found, groups) <= imbalance(loads, balance_experts(loads, start, groups), groups) + 1e-12
        assert len(found.copies) == groups * spare and all(-1 <= slot < experts for slot in found.copies)


@pytest.mark.parametrize("experts, groups, sizes", [(8, 3, [3, 3, 2]), (4, 3, [2, 2, 0]), (6, 2, [3, 3]), (5, 1, [5])])
def test_every_rank_keeps_as_many_as_it_has(experts: int, groups: int, sizes: list[int]) -> None:
    assert sizes_of(experts, groups) == sizes
    draw = random.Random(experts)
    slots: Sequence[int] = [*range(experts)]
    for _ in range(50):
        loads = [draw.choice((0.0, 1.0, draw.expovariate(1.0))) for _ in range(experts)]
        slots = balance_experts(loads, lie(*slots), groups).slots
        assert sorted(slots) == [*range(experts)] and [len(one) for one in ranks(slots, experts, groups)] == sizes


def test_close_to_the_best_of_all() -> None:
    """Of 8 experts on 2 ranks of 4, all 70 ways are tried."""
    draw = random.Random(0)
    for _ in range(100):
        loads = [draw.expovariate(1.0) for _ in range(8)]
        total = sum(loads)
        best = min(max(sum(half), total - sum(half)) for half in itertools.combinations(loads, 4))
        found = imbalance(loads, balance_experts(loads, lie(*range(8)), 2), 2) * total / 2
        assert best - 1e-12 <= found <= 4 / 3 * best
