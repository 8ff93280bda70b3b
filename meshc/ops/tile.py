"""Global indices of a tile's elements as a base and strides over merged dims, by which the random kernels number their draws."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsInt

MAX_DIMS = 16
"""Limit of the kernels' index arithmetic."""


@dataclass(frozen=True)
class Tile:
    """Local element (i0, i1, ...) is global element `base + sum i_k * stride_k`; dims are merged where their strides allow."""

    base: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @functools.cached_property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @functools.cached_property
    def rows(self) -> tuple[ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_int64]]:
        """Sizes and strides as the compiled kernel reads them."""
        row = ctypes.c_int64 * len(self.sizes)
        return row(*self.sizes), row(*self.strides)


def tile_of(global_shape: Sequence[SupportsInt], local_shape: Sequence[SupportsInt], offsets: Sequence[SupportsInt]) -> Tile:
    """The tile of `local_shape` at `offsets` of a row-major tensor of `global_shape`; it may reach past the end (padding)."""
    return _merge_dims(*(tuple(map(int, entries)) for entries in (global_shape, local_shape, offsets)))


@functools.lru_cache(maxsize=4096)
def _merge_dims(global_shape: tuple[int, ...], local_shape: tuple[int, ...], offsets: tuple[int, ...]) -> Tile:
    if not len(global_shape) == len(local_shape) == len(offsets):
        raise ValueError(f"global shape {global_shape}, local shape {local_shape} and offsets {offsets} differ in length")
    if any(size < 0 for size in (*global_shape, *local_shape, *offsets)):
        raise ValueError(f"negative entry in global shape {global_shape}, local shape {local_shape} or offsets {offsets}")
    base, stride = 0, 1
    dims: list[tuple[int, int]] = []  # (size, stride), innermost first
    for whole, size, offset in zip(reversed(global_shape), reversed(local_shape), reversed(offsets), strict=True):
        base += offset * stride
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        elif size != 1:
            dims.append((size, stride))
        stride *= whole
    dims = dims or [(1, 1)]
    if len(dims) > MAX_DIMS:
        raise ValueError(f"a tile with {len(dims)} separately split dims; at most {MAX_DIMS} are supported")
    return Tile(base, tuple(size for size, _ in reversed(dims)), tuple(stride for _, stride in reversed(dims)))
