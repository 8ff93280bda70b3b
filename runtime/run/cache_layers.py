"""Cache layers for transformers' models: DTensors between calls of a program, with counts of the rows and tokens in use.

    CacheLayer            keys, values [rows, heads, capacity, head], `length` tokens of them in use, and room for more
    WindowLayer           likewise, of the last tokens only: token number `first` at the first place, the last at `length - 1 - first`
    RecurrentStateLayer   {"conv_states": {0: DTensor}, "recurrent_states": {0: DTensor}}, of one size at any length
    MixedStateLayer       states beside keys and values

Layers implement what a stock model's own code calls on a cache (length, reordered beams, selected rows, fewer tokens) with plain tensors as
arguments, and no rank ever holds the whole. There is room for more rows and tokens than are in use: a program is for one buffer size.
New tokens are written behind the others; when a window's buffer is full, the tokens still needed move to its front between two calls, which
is rare, since there is room for more than the window (`padded_sizes.room_of`). From states no tokens can be taken back: earlier ones are
not kept. This file imports transformers, and is itself imported only where a cache of transformers is met.

Whisper's generate, if it is to return more than tokens, splits the finished cache into rows on the host: it gets plain tensors on every
rank, for which buffers are replicated. The caller is read off the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from meshc.errors import StateError
from meshc.frontend.libraries.stock_caches import STATES, LayerParts, layer_tree
from meshc.frontend.padded_sizes import capacity_of, room_of
from meshc.ir import layouts

ROWS, TOKENS = 0, 2
"""Dims of a buffer."""
TAKES_APART: Final = ("transformers.models.whisper.generation_whisper", "split_by_batch_index")
"""The function that reads rows of a cache as plain tensors, on every rank: module, name."""
Tables = Mapping[str, Mapping[int, DTensor]]


class RowLayer:
    """Rows of a cache layer, which can be reordered, selected and repeated; `_take` selects them by index."""

    rows: int

    def _take(self, rows: Tensor) -> None:
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        return self.rows

    def offload(self) -> None:
        """Does nothing: the cache stays on its device."""

    def prefetch(self) -> None:
        """Does nothing: the cache stays on its device."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] is."""
        self._take(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Selects rows, by index or by a boolean mask."""
        self._take(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times."""
        self._take(torch.arange(self.rows).repeat_interleave(repeats))


class CacheLayer(RowLayer, DynamicLayer):
    """Keys and values of one layer. `keys` and `values` are the parts in use, as DTensors."""

    is_compileable, is_croppable, supports_early_init = False, True, False

    def __init__(self, buffers: Sequence[DTensor], rows: int, length: int, is_sliding: bool = False, max_length: int = -1) -> None:
        self.buffers, self.rows, self.length = tuple(buffers), rows, length
        self.is_sliding = is_sliding
        self.max_length = max_length
        self.is_initialized = True

    @property
    def keys(self) -> Tensor:
        return self._read_buffer(0, sys._getframe(1))

    @property
    def values(self) -> Tensor:
        return self._read_buffer(1, sys._getframe(1))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the layer has its buffers already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> NoReturn:
        """Raises StateError: only the program writes to the cache."""
        refuse_writer()

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last `-tokens_to_remove` tokens. Raises ValueError for a positive number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes how many tokens to forget as a negative number, not {tokens_to_remove}")
        self.length = max(self.length + tokens_to_remove, 0)

    def reset(self) -> None:
        self.length = 0

    def _take(self, rows: Tensor) -> None:
        if self.length == 0:
            return
        self.buffers = tuple(select_rows(buffer, rows) for buffer in self.buffers)
        self.rows = len(rows)

    def _read_buffer(self, number: int, caller: FrameType) -> Tensor:
        if (caller.f_globals.get("__name__"), caller.f_code.co_name) != TAKES_APART:
            return self._filled_part(self.buffers[number])
        self.buffers = tuple(replicate_buffer(buffer) for buffer in self.buffers)
        return self._filled_part(self.buffers[number]).to_local()

    def _filled_part(self, buffer: DTensor) -> Any:
        return buffer[: self.rows, :, : self.length]

    def tree(self, rows: int, capacity: int) -> Any:
        """What a program takes of the layer: with `rows` rows and room for `capacity` tokens; unused elements are arbitrary."""
        return layer_tree(self._resize_buffers(rows, capacity))

    def _resize_buffers(self, rows: int, capacity: int, begin: int = 0) -> tuple[DTensor, ...]:
        fit = self.buffers
        if fit[0].shape[ROWS] != rows:
            every = torch.arange(rows).clamp(max=self.rows - 1)
            fit = tuple(select_rows(buffer, every) for buffer in fit)
        if begin or fit[0].shape[TOKENS] != capacity:
            fit = tuple(resize_tokens(buffer, capacity, begin) for buffer in fit)
        return fit


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

    def tree(self, rows: int, capacity: int, first: int = 0) -> Any:
        """Likewise, with token `first` at the first place."""
        return layer_tree(self._resize_buffers(rows, capacity, first - self.first), is_window=True)

    def begin_at(self, first: int, capacity: int) -> None:
        """Replaces the buffers by ones of `capacity` places that begin at token `first`."""
        self.buffers, self.first = self._resize_buffers(self.buffers[0].shape[ROWS], capacity, first - self.first), first


class RecurrentStateLayer(RowLayer, LinearAttentionLayer):
    """States of one recurrent layer, by kind and number. `conv_states` and `recurrent_states` are the rows in use, as DTensors."""

    is_compileable, is_croppable = False, False
    record_past = False

    def __init__(self, tables: Tables, rows: int, length: int) -> None:
        self.tables: dict[str, dict[int, DTensor]] = {name: {**table} for name, table in tables.items()}
        self.rows, self.length = rows, length

    @property
    def conv_states(self) -> dict[int, Any]:
        return self._in_use(STATES[0])

    @property
    def recurrent_states(self) -> dict[int, Any]:
        return self._in_use(STATES[1])

    @property
    def has_previous_state(self) -> dict[int, bool]:
        return {number: True for table in self.tables.values() for number in table} or {0: False}

    @property
    def number_of_states(self) -> int:
        return len(self.has_previous_state)

    def update_conv_state(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises StateError: only the program writes to the cache."""
        refuse_writer()

    update_recurrent_state = update_conv_state

    def activate_past_recording(self) -> None:
        """Raises StateError: tokens cannot be taken back."""
        raise StateError(
            "a program's cache of states cannot take tokens back, which generating with an assistant or by looking up the prompt does\n"
            "  what to do: generate without assistant_model and prompt_lookup_num_tokens"
        )

    def reset(self) -> None:
        self.tables, self.length = {}, 0

    def tree(self, rows: int, capacity: int) -> Any:
        """What a program takes of the layer: with `rows` rows, of which those not in use are arbitrary."""
        return layer_tree((), self._states(rows))

    def _states(self, rows: int) -> Tables:
        every = torch.arange(rows).clamp(max=self.rows - 1)
        return {
            name: {n: x if x.shape[ROWS] == rows else select_rows(x, every) for n, x in table.items()}
            for name, table in self.tables.items()
        }

    def _take(self, rows: Tensor) -> None:
        if self.tables:
            self.tables = {name: {n: select_rows(x, rows) for n, x in table.items()} for name, table in self.tables.items()}
            self.rows = len(rows)

    def _in_use(self, name: str) -> dict[int, Any]:
        return {number: state[: self.rows] for number, state in self.tables.get(name, {}).items()}


class MixedStateLayer(RecurrentStateLayer, CacheLayer):
    """States, keys and values of a layer with both a recurrence and attention."""

    is_compileable, is_croppable = False, False

    def __init__(
        self, tables: Tables, buffers: Sequence[DTensor], rows: int, length: int, is_sliding: bool = False, max_length: int = -1
    ) -> None:
        CacheLayer.__init__(self, buffers, rows, length, is_sliding, max_length)
        RecurrentStateLayer.__init__(self, tables, rows, length)

    def tree(self, rows: int, capacity: int) -> Any:
        return layer_tree(self._resize_buffers(rows, capacity), self._states(rows))

    def reset(self) -> None:
        RecurrentStateLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        RecurrentStateLayer.crop(self, tokens_to_remove)

    def _take(self, rows: Tensor) -> None:
        if self.length:
            self.buffers = tuple(select_rows(buffer, rows) for buffer in self.buffers)
        RecurrentStateLayer._take(self, rows)


def layer_on_mesh(
    parts: LayerParts, rows: int, length: int, *, first: int = 0, window: int | None = None, since: int | None = None,
    is_sliding: bool = False, max_length: int = -1,
) -> CacheLayer | RecurrentStateLayer:  # fmt: skip
    """The layer of these parts; the other arguments are those of the layers' classes. window: of sliding attention; None: of another."""
    if window is not None:
        return WindowLayer(parts.pair, rows, length, window, first, since)
    if parts.states is None:
        return CacheLayer(parts.pair, rows, length, is_sliding, max_length)
    if not parts.pair:
        return RecurrentStateLayer(parts.states, rows, length)
    return MixedStateLayer(parts.states, parts.pair, rows, length, is_sliding, max_length)


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


def select_rows(buffer: DTensor, rows: Tensor) -> DTensor:
    """A buffer of the selected rows, sharded like `buffer`. Only the dim of rows is gathered for it."""
    return _apply_along_dim(buffer, ROWS, len(rows), lambda local: local.index_select(ROWS, rows.to(local.device)))


def resize_tokens(buffer: DTensor, capacity: int, begin: int = 0) -> DTensor:
    """A buffer with room for `capacity` tokens, from place `begin` of `buffer` on; a negative `begin` puts as many places before it."""
    more = capacity - buffer.shape[TOKENS] + begin
    return _apply_along_dim(buffer, TOKENS, capacity, lambda local: F.pad(local, (0, 0, -begin, more)))


def replicate_buffer(buffer: DTensor) -> DTensor:
    """The buffer, replicated on every rank."""
    return buffer.redistribute(placements=[Replicate()] * buffer.device_mesh.ndim)


def _apply_along_dim(buffer: DTensor, dim: int, size: int, work: Callable[[Tensor], Tensor]) -> DTensor:
    """`work` applied to the local part of `buffer` with `dim` gathered, the result sharded like `buffer`. size: of `dim` after `work`."""
    placements = buffer.placements
    splits = [isinstance(place, Shard) and place.dim == dim for place in placements]
    whole = [Replicate() if split else place for place, split in zip(placements, splits, strict=True)]
    local = work(buffer.redistribute(placements=whole).to_local() if any(splits) else buffer.to_local())
    made = layouts.dtensor_of(local.contiguous(), buffer.device_mesh, whole, [*buffer.shape[:dim], size, *buffer.shape[dim + 1 :]])
    return made.redistribute(placements=placements) if any(splits) else made


def refuse_writer() -> NoReturn:
    """Raises StateError: only the program writes to a cache."""
    raise StateError(
        "this cache lies on the mesh, split as its program reads it, and a model that is not compiled cannot write to it\n"
        "  what to do: give it to the compiled model, or start this model with a cache of its own"
    )
