"""A rank's tile of a tensor as contiguous ranges of the whole, and those that two tiles share.

    weight on disk     0 1 2 3 4 5 6 7 8 9 10 11        3 * heads 4/tp: rank 1 of 2 has heads 2 and 3 of each third
    this rank's tile       2 3     6 7     10 11        pieces (2, 0, 2), (6, 2, 2), (10, 4, 2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from meshc.ir import layouts
from meshc.ir.sharding import Part, Sharding

Run = tuple[int, int, int]
"""Contiguous indices of a dim: (first global index, first index in the tile, length)."""


def tile_runs(sharding: Sharding, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> list[list[Run]]:
    """For each dim, the contiguous ranges of a rank's tile."""
    return [
        list(_dim_runs(tuple((part.size, tuple((sizes[axis], coordinates[axis]) for axis in part.axes)) for part in parts)))
        for parts in sharding.dims
    ]


@lru_cache(maxsize=4096)
def _dim_runs(parts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]) -> tuple[Run, ...]:
    """The ranges of a dim with these parts: (size, (size, coordinate) of each axis that splits it). Memoised: layers share them."""
    sizes = {f"{at}.{axis}": size for at, (_, axes) in enumerate(parts) for axis, (size, _) in enumerate(axes)}
    coordinates = {f"{at}.{axis}": here for at, (_, axes) in enumerate(parts) for axis, (_, here) in enumerate(axes)}
    one = Sharding((tuple(Part("", size, tuple(f"{at}.{axis}" for axis in range(len(axes)))) for at, (size, axes) in enumerate(parts)),))
    places = layouts.take_tile(torch.arange(1, one.shape[0] + 1), one, sizes, coordinates).tolist()  # 0 is padding
    runs: list[Run] = []
    for position, place in enumerate(places):
        if not place:
            continue
        if runs and runs[-1][0] + runs[-1][2] == place - 1 and runs[-1][1] + runs[-1][2] == position:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((place - 1, position, 1))
    return tuple(runs)


def shared_runs(source: Sequence[Run], target: Sequence[Run]) -> list[Run]:
    """The ranges that two tiles of a dim share: (first index in the source's tile, first index in the target's tile, length)."""
    found = []
    for start, at, length in source:
        for other, to, count in target:
            first, last = max(start, other), min(start + length, other + count)
            if first < last:
                found.append((at + first - start, to + first - other, last - first))
    return found
