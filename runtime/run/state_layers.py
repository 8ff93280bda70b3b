"""Cache layers of recurrent layers between calls of a program: states on the mesh, of one size at any length.

    DynamicCache(layers=[StateLayer, StateLayer, CacheLayer, ...])     each: {"conv_states": {0: DTensor}, "recurrent_states": {0: DTensor}}

Layers implement what a stock model's own code calls on a cache, as `cache_layers.py` does for keys and values. Tokens cannot be taken back:
earlier states are not kept. This file imports transformers, and is itself imported only where a cache of transformers is met.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.cache_utils import LinearAttentionLayer

from meshc.errors import StateError
from meshc.frontend.libraries.stock_caches import STATES
from meshc.runtime.run.cache_layers import ROWS, CacheLayer, select_rows
from meshc.runtime.run.row_layers import RowLayer, refuse_writer

Tables = Mapping[str, Mapping[int, DTensor]]


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

    def states_of(self, rows: int) -> dict[str, dict[int, DTensor]]:
        """The states with `rows` rows; unused rows are arbitrary."""
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

    def reset(self) -> None:
        RecurrentStateLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        RecurrentStateLayer.crop(self, tokens_to_remove)

    def _take(self, rows: Tensor) -> None:
        if self.length:
            self.buffers = tuple(select_rows(buffer, rows) for buffer in self.buffers)
        RecurrentStateLayer._take(self, rows)
