"""Rows that are used against those of the whole groups, by plain definitions."""

from __future__ import annotations

from math import nan

import pytest
import torch
from torch import Tensor

from meshc.ops import used_rows as ops
from meshc.ops.expert_groups import from_groups, group_choices, group_mm, group_outer, to_groups

GENERATOR = torch.Generator().manual_seed(0)
CHOICE = torch.tensor([[4, 0, 2], [1, 3, 0], [6, 4, 5], [2, 6, 1], [7, 0, 6], [3, 2, 5], [6, 1, 4]])  # of 7 experts; 7 is none
TOKENS, CHOSEN, EXPERTS = 7, 3, 4


def f(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=dtype)


def group(number: int) -> Tensor:
    """What the tokens have chosen of experts 0 to 3, or of 4 to 7."""
    return group_choices(CHOICE, 1, EXPERTS, CHOSEN, number)[0]


def test_places_that_have_a_choice_lie_by_expert() -> None:
    own = group_choices(torch.tensor([[1, 3], [0, 1], [2, 2], [1, 0]]), 1, 2, 2, 0)[0]
    assert own.tolist() == [[[1, -1], [0, 1], [-1, -1], [1, 0]]]
    used, ends = ops.used_rows(own, 2)
    assert used.tolist() == [[2, 7, 0, 3, 6]] and ends.tolist() == [2, 5]
    assert ops.used_rows(own, 1)[0].tolist() == [[2, 7]]  # of an expert that is not there no row is used


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_on_used_rows_is_the_layer_on_all(number: int) -> None:
    own, x, up, down = group(number), f(TOKENS, 5), f(EXPERTS, 5, 6), f(EXPERTS, 6, 5)
    choice, (used, ends) = own.flatten(1), ops.used_rows(own, EXPERTS)
    all_rows = to_groups(x, own).flatten(1, 2)
    made = group_mm(all_rows, up, choice, EXPERTS, 0.5)
    wanted = from_groups(group_mm(made.relu(), down, choice, EXPERTS, 0.5).view(1, TOKENS, CHOSEN, 5), own)

    rows = ops.rows_of_tokens(x, used, CHOSEN)
    torch.testing.assert_close(rows, ops.rows_of_places(all_rows, used))
    hidden = ops.used_mm(rows, up, ends, 0.5)
    torch.testing.assert_close(ops.places_of_rows(hidden, used, TOKENS * CHOSEN), made)
    out = ops.tokens_of_rows(ops.used_mm(hidden.relu(), down, ends, 0.5), used, TOKENS, CHOSEN)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(ops.used_outer(rows, hidden, ends, 0.5), group_outer(all_rows, made, choice, EXPERTS, EXPERTS, 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_over_a_tokens_rows_round_as_one_sum_does(dtype: torch.dtype) -> None:
    own = group(0)
    used, _ = ops.used_rows(own, EXPERTS)
    rows = f(1, used.shape[1], 3, dtype=dtype)
    whole = ops.places_of_rows(rows, used, TOKENS * CHOSEN).view(1, TOKENS, CHOSEN, 3)
    torch.testing.assert_close(ops.tokens_of_rows(rows, used, TOKENS, CHOSEN), from_groups(whole, own))


def test_no_row_at_all_gives_zeros() -> None:
    used, ends = ops.used_rows(torch.full((1, TOKENS, CHOSEN), -1), EXPERTS)
    rows = ops.used_mm(ops.rows_of_tokens(f(TOKENS, 5), used, CHOSEN), f(EXPERTS, 5, 6), ends, 0.5)
    assert used.shape == (1, 0) and rows.shape == (1, 0, 6) and ends.tolist() == [0] * EXPERTS
    assert torch.equal(ops.tokens_of_rows(rows, used, TOKENS, CHOSEN), torch.zeros(TOKENS, 6, dtype=torch.float64))
    assert torch.equal(ops.used_outer(rows, rows, ends, 0.5), torch.zeros(EXPERTS, 6, 6, dtype=torch.float64))
    assert ops.rows_spread(rows, 2, 12, 1, 2).shape == (1, 0, 12)


def test_tokens_without_a_choice_are_not_read() -> None:
    own, x = group(1), f(TOKENS, 5)
    x[(own < 0).all(2)[0]] = nan
    used, ends = ops.used_rows(own, EXPERTS)
    assert torch.isnan(x).any() and not torch.isnan(ops.rows_of_tokens(x, used, CHOSEN)).any()
    assert ends[-1] == (own >= 0).sum() == used.shape[1]


@pytest.mark.parametrize("bounds", [(0, 12, 2), (1, 12, 2), (6, 12, 1), (11, 12, 1)])
def test_a_slice_lies_where_it_was_taken(bounds: tuple[int, int, int]) -> None:
    start, end, step = bounds
    x = f(1, 4, 12)
    part = x[:, :, slice(start, end, step)]
    wanted = torch.ops.aten.slice_backward(part, [1, 4, 12], 2, start, end, step)
    assert torch.equal(ops.rows_spread(part, 2, 12, start, step), wanted)
    wide = ops.rows_spread(part.unsqueeze(3), 2, 12, start, step)  # of a dim that is not the last
    assert torch.equal(wide.squeeze(3), wanted)


def test_fakes_say_how_many_rows_there_may_be() -> None:
    with torch._subclasses.FakeTensorMode():
        own = torch.zeros(1, TOKENS, CHOSEN, dtype=torch.int64)
        used, ends = torch.ops.meshc.used_rows(own, EXPERTS)
        rows = torch.ops.meshc.rows_of_tokens(torch.zeros(TOKENS, 5), used, CHOSEN)
        made = torch.ops.meshc.used_mm(rows, torch.zeros(EXPERTS, 5, 6), ends, 0.5)
        shapes = [
            list(each.shape)
            for each in (
                used, ends, rows, made, torch.ops.meshc.used_outer(rows, made, ends, 0.5),
                torch.ops.meshc.tokens_of_rows(made, used, TOKENS, CHOSEN), torch.ops.meshc.places_of_rows(made, used, 21),
                torch.ops.meshc.rows_spread(made, 2, 12, 0, 2),
            )
        ]  # fmt: skip
    assert shapes == [[1, 21], [4], [1, 21, 5], [1, 21, 6], [4, 5, 6], [7, 6], [1, 21, 6], [1, 21, 12]]
