"""Key-value cache layers for transformers' models: DTensor buffers between calls of a program, with counts of rows and tokens in use.

    DynamicCache(layers=[CacheLayer, CacheLayer, ...])     each: two DTensors [rows, heads, capacity, head], `rows` and `length` in use

Layers implement what a stock model's own code calls on a cache (length, reordered beams, selected rows, fewer tokens) with plain tensors as
arguments, and no rank ever holds the whole. Buffers have room for more rows and tokens than are in use: a program is for one buffer size.
This file imports transformers, and is itself imported only where a cache of transformers is met.

Whisper's generate, if it is to return more than tokens, splits the finished cache into rows on the host: it gets plain tensors on every
rank, for which buffers are replicated. The caller is read off the stack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.cache_utils import DynamicLayer

from meshc.runtime.run.row_layers import RowLayer, refuse_writer

ROWS, TOKENS = 0, 2
"""Dims of a buffer."""
TAKES_APART: Final = ("transformers.models.whisper.generation_whisper", "split_by_batch_index")
"""The function that reads rows of a cache as plain tensors, on every rank: module, name."""


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

    def fit_buffers(self, rows: int, capacity: int) -> tuple[DTensor, ...]:
        """The buffers with `rows` rows and room for `capacity` tokens; unused elements are arbitrary."""
        return self._resize_buffers(rows, capacity)

    def _resize_buffers(self, rows: int, capacity: int, begin: int = 0) -> tuple[DTensor, ...]:
        fit = self.buffers
        if fit[0].shape[ROWS] != rows:
            every = torch.arange(rows).clamp(max=self.rows - 1)
            fit = tuple(select_rows(buffer, every) for buffer in fit)
        if begin or fit[0].shape[TOKENS] != capacity:
            fit = tuple(resize_tokens(buffer, capacity, begin) for buffer in fit)
        return fit


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
    mesh, placements = buffer.device_mesh, buffer.placements
    splits = [isinstance(place, Shard) and place.dim == dim for place in placements]
    whole = [Replicate() if split else place for place, split in zip(placements, splits, strict=True)]
    local = work(buffer.redistribute(placements=whole).to_local() if any(splits) else buffer.to_local())
    shape = torch.Size([*buffer.shape[:dim], size, *buffer.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(local.contiguous(), mesh, whole, run_check=False, shape=shape, stride=stride)
    return made.redistribute(placements=placements) if any(splits) else made
