"""Sizes that calls with a cache are filled up to: few, and none too small."""

from __future__ import annotations

import pytest

from meshc.frontend.padded_sizes import capacity_of, room_of, rows_of, tokens_of


@pytest.mark.parametrize("tokens, most, filled", [(1, 100, 1), (2, 100, 16), (17, 100, 32), (64, 100, 64), (65, 100, 100), (120, 100, 120)])
def test_tokens_are_a_power_of_two_as_far_as_there_are_positions(tokens: int, most: int, filled: int) -> None:
    assert tokens_of(tokens, most) == filled


@pytest.mark.parametrize("rows, ranks, filled", [(1, 1, 1), (1, 2, 2), (3, 2, 4), (15, 1, 16), (17, 1, 32), (33, 4, 48)])
def test_rows_give_each_data_rank_one(rows: int, ranks: int, filled: int) -> None:
    assert rows_of(rows, ranks) == filled


def test_buffers_double_or_are_as_long_as_their_user_says() -> None:
    assert [capacity_of(tokens, 64, -1) for tokens in (12, 64, 65, 300)] == [64, 64, 128, 512]
    assert capacity_of(12, 16, -1) == 64
    assert [capacity_of(tokens, 16, 60) for tokens in (17, 60, 61)] == [60, 60, 64]


def test_buffers_of_a_window_have_room_for_it_and_an_eighth_or_for_what_a_call_needs() -> None:
    assert [room_of(window, window) for window in (4, 60, 1000, 4096)] == [64, 128, 1152, 4608]
    assert room_of(1000, 999 + 512) == 1536


def test_a_thousand_tokens_are_ten_programs_at_most() -> None:
    """A prompt of each length, and then a token at a time: a program for each size of the prompt, and each of the buffers."""
    for prompt in (1, 5, 100, 1000):
        capacity, programs = tokens_of(prompt, 1 << 62), {("prompt", tokens_of(prompt, 1 << 62))}
        for past in range(prompt, prompt + 1000):
            capacity = capacity_of(past + 1, capacity, -1)
            programs.add(("token", capacity))
        assert len(programs) <= 10
