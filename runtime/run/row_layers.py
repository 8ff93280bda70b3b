"""Base class of cache layers on the mesh: rows can be reordered, selected and repeated; only the program writes to a cache."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from meshc.errors import StateError


class RowLayer:
    """A cache layer of `rows` rows; `_take` selects rows by index."""

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


def refuse_writer() -> NoReturn:
    """Raises StateError: only the program writes to a cache."""
    raise StateError(
        "this cache lies on the mesh, split as its program reads it, and a model that is not compiled cannot write to it\n"
        "  what to do: give it to the compiled model, or start this model with a cache of its own"
    )
