"""Sizes that calls with a cache are filled up to, so that few programs serve all of them.

    rows 3 -> 4, 17 -> 32      tokens 1 -> 1, 40 -> 64      buffers for 70 tokens -> 128      for a window of 1,000 -> 1,152 at most
"""

from __future__ import annotations

from typing import Final

LEAST_ROWS_STEP: Final = 16
"""Rows are filled up to a power of two, and from here on to multiples of this."""
LEAST_TOKENS: Final = 16
LEAST_CAPACITY: Final = 64
SPARE: Final = 8
"""Of a window's tokens one in so many more is room for new ones: as many tokens later, what is left of the window moves to the front."""


def rows_of(rows: int, data_ranks: int) -> int:
    """How many rows a program has for these; at least one for each rank among which they are split."""
    size = power_of_two(rows) if rows < LEAST_ROWS_STEP else -(-rows // LEAST_ROWS_STEP) * LEAST_ROWS_STEP
    return max(size, data_ranks)


def tokens_of(tokens: int, most: int) -> int:
    """How many new tokens a program takes for these: one alone, or a power of two, as far as the model has positions (`most`)."""
    return 1 if tokens == 1 else max(tokens, min(max(power_of_two(tokens), LEAST_TOKENS), most))


def capacity_of(tokens: int, have: int, most: int) -> int:
    """Tokens that buffers have room for which must hold these: as many as their user has named (`most`, or -1), as many as there are, or
    twice as many as often as it takes."""
    if tokens <= most:
        return most
    return have if LEAST_CAPACITY <= have >= tokens else max(power_of_two(tokens), LEAST_CAPACITY)


def room_of(window: int, tokens: int) -> int:
    """Tokens that buffers of a window's have room for at most where a call has these in them, the new ones and all that they see."""
    least = max(tokens, window - 1 + window // SPARE + 1)
    return -(-least // LEAST_CAPACITY) * LEAST_CAPACITY


def power_of_two(size: int) -> int:
    """The least that is no less."""
    return 1 << max(size - 1, 0).bit_length()
