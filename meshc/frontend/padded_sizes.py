"""Padded sizes for calls with a cache, so that few programs serve all sizes.

    rows 3 -> 4, 17 -> 32      tokens 1 -> 1, 40 -> 64      buffers for 70 tokens -> 128      for a window of 1,000 -> 1,152 at most
"""

from __future__ import annotations

from typing import Final

LEAST_ROWS_STEP: Final = 16
"""Rows are padded to a power of two, and from here on to multiples of this."""
LEAST_TOKENS: Final = 16
LEAST_CAPACITY: Final = 64
SPARE: Final = 8
"""A window's buffers have room for window / SPARE more tokens: when it is full, the rest of the window moves to the front."""


def rows_of(rows: int, data_ranks: int) -> int:
    """The padded number of rows; at least one for each rank among which rows are split."""
    size = power_of_two(rows) if rows < LEAST_ROWS_STEP else -(-rows // LEAST_ROWS_STEP) * LEAST_ROWS_STEP
    return max(size, data_ranks)


def tokens_of(tokens: int, most: int) -> int:
    """The padded number of new tokens: one alone, or a power of two, at most `most`, the positions of the model."""
    return 1 if tokens == 1 else max(tokens, min(max(power_of_two(tokens), LEAST_TOKENS), most))


def capacity_of(tokens: int, have: int, most: int) -> int:
    """The capacity of buffers for `tokens` tokens: the user's own (`most`, or -1), the present one (`have`), or the next power of two."""
    if tokens <= most:
        return most
    return have if LEAST_CAPACITY <= have >= tokens else max(power_of_two(tokens), LEAST_CAPACITY)


def room_of(window: int, tokens: int) -> int:
    """The greatest capacity of a window's buffers in a call with `tokens` tokens, the new ones and all that they see."""
    least = max(tokens, window - 1 + window // SPARE + 1)
    return -(-least // LEAST_CAPACITY) * LEAST_CAPACITY


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
