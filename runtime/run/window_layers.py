"""Cache layers of sliding-window attention between calls of a program: buffers of the last tokens only.

    buffers [rows, heads, capacity, head]      token number `first` at the first place, the last at place `length - 1 - first`

New tokens are written behind the others, as in any buffer. When a buffer is full, the tokens still needed move to its front between two
calls; that is rare, since there is room for more than the window (`padded_sizes.room_of`). This file imports transformers, and is itself
imported only where a cache of transformers is met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from meshc.errors import StateError
from meshc.frontend.padded_sizes import capacity_of, room_of
from meshc.runtime.run.cache_layers import ROWS, TOKENS, CacheLayer


class WindowLayer(CacheLayer):
    """Keys and values of one layer. `keys` and `values` are those that the next token may see, as DTensors.

    window  number of tokens that a token sees, itself included
    since   number of tokens when tokens were last taken back; None: none will be
    """

    def __init__(
        self, buffers: Sequence[DTensor], rows: int, length: int, window: int, first: int = 0, since: int | None = None
    ) -> None:  # fmt: skip
        super().__init__(buffers, rows, length, is_sliding=True)
        self.window, self.first, self.since = window, first, since

    @property
    def record_past(self) -> bool:
        """Whether tokens may be taken back, as in assisted generation: tokens that leave the window are kept until the next `crop`."""
        return self.since is not None

    def activate_past_recording(self) -> None:
        if self.since is None:
            self.since = self.length

    @property
    def first_needed(self) -> int:
        """Index of the first token that is still needed."""
        return max((self.length if self.since is None else self.since) - self.window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        before = min(self.length, self.window - 1)
        return before + query_length, self.length - before

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last tokens. Raises StateError if tokens of the window before them are gone."""
        if self.length >= self.window and (self.since is None or self.length + tokens_to_remove < self.since):
            raise StateError(
                f"this cache has {self.length} tokens, and a layer of it only those that its window of {self.window} shows: others "
                "cannot come back\n  what to do: call cache.activate_past_recording() before the tokens that may be taken back are passed"
            )
        super().crop(tokens_to_remove)
        if self.since is not None:
            self.since = self.length

    def reset(self) -> None:
        super().reset()
        self.first = 0

    def _filled_part(self, buffer: DTensor) -> Any:
        return buffer[: self.rows, :, self.first_needed - self.first : self.length - self.first]

    def rebase_buffers(self, rows: int, capacity: int, first: int) -> tuple[DTensor, ...]:
        """The buffers with `rows` rows, room for `capacity` tokens, and token `first` at the first place."""
        return self._resize_buffers(rows, capacity, first - self.first)

    def begin_at(self, first: int, capacity: int) -> None:
        """Replaces the buffers by ones of `capacity` places that begin at token `first`."""
        self.buffers, self.first = self.rebase_buffers(self.buffers[0].shape[ROWS], capacity, first), first


def window_extent(windows: Sequence[WindowLayer], tokens: int) -> tuple[int, int]:
    """First token and capacity, common to the buffers of all `windows`, for a call after which there are `tokens` tokens."""
    first, needed = (min(getattr(layer, name) for layer in windows) for name in ("first", "first_needed"))
    most = room_of(max(layer.window for layer in windows), tokens - needed)
    room = min(capacity_of(tokens - first, windows[0].buffers[0].shape[TOKENS], -1), most)
    return (first, room) if tokens - first <= room else (needed, most)


def drop_unseen_tokens(windows: Sequence[WindowLayer]) -> None:
    """After a prompt: drops tokens that no later token sees, in layers whose buffers are larger than needed."""
    needed = min(layer.first_needed for layer in windows)
    for layer in windows:
        most = room_of(max(each.window for each in windows), layer.length - needed)
        if layer.buffers[0].shape[TOKENS] > most:
            layer.begin_at(needed, most)
