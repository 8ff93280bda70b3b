"""Order: a value that an axis splits may lie in zigzag order along it; while a program is partitioned, its sharding says so.

    seq 4096/cp            the tiles of the ranks, one after the other
    seq 4096/cp~zigzag     of each tile the second half is that of the mirrored rank: rank r has the halves 2 r and 2 n - 1 - 2 r

What treats each position by itself computes on either alike, so of what it makes no more than the order is said. The per-rank program
speaks of axes alone: there the exchange of halves that a change of order is stands as a line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeVar

from meshc.ir.sharding import Sharding

Key = TypeVar("Key")

_MARK: Final = "~zigzag"


def zigzag(axis: str) -> str:
    """The axis, as it splits what lies in zigzag order."""
    return axis + _MARK


def is_zigzag(axis: str) -> bool:
    return axis.endswith(_MARK)


def plain(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes themselves."""
    return tuple(axis.removesuffix(_MARK) for axis in axes) if any(map(is_zigzag, axes)) else axes


def plain_tokens(axes: Mapping[Key, tuple[str, ...]]) -> dict[Key, tuple[str, ...]]:
    return {key: plain(each) for key, each in axes.items()}


def turned(sharding: Sharding) -> bool:
    """Whether anything of it lies in zigzag order."""
    return any(is_zigzag(axis) for _, _, part in sharding.parts() for axis in part.axes)


def natural(sharding: Sharding) -> Sharding:
    """The same in natural order."""
    if not turned(sharding):
        return sharding
    return replace(sharding, dims=tuple(tuple(replace(part, axes=plain(part.axes)) for part in parts) for parts in sharding.dims))
