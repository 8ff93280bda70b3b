"""Bounds of declared types: extents, bytes, dims, and shardings that fit the axes and the local shape.

Bounds are far above the sizes of programs and far below 64 bits: a kernel's products of extents never overflow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Final

from meshc.ir import Record
from meshc.ir.sharding import Sharding, is_padded, local_shape

MOST_BYTES: Final = 1 << 46
"""Most bytes of one value on one rank."""
MOST_EXTENT: Final = 1 << 46
MOST_DIMS: Final = 32


class Wrong(Exception):
    """A fault of one value; callers that know its line report it in an ArtifactError."""


def check_type(record: Record, sizes: Mapping[str, int]) -> None:
    """Raises Wrong for a record that no value on a rank can have; `sizes` are those of all axes."""
    if record.dtype is None:
        return
    check_extents(record.shape, record.dtype.itemsize)
    if record.sharding is not None:
        _check_sharding(record.sharding, sizes)
        implied = local_shape(record.sharding, sizes)
        if tuple(record.shape) != implied:
            raise Wrong(f"its shape is {list(record.shape)}, but a rank's tile of {record.sharding} is {list(implied)}")


def check_extents(shape: tuple[int, ...], itemsize: int) -> None:
    if len(shape) > MOST_DIMS:
        raise Wrong(f"it has {len(shape)} dims; values have at most {MOST_DIMS}")
    if any(extent < 0 for extent in shape):
        raise Wrong(f"its shape {list(shape)} has a negative extent")
    if any(extent > MOST_EXTENT for extent in shape) or prod(max(extent, 1) for extent in shape) * itemsize > MOST_BYTES:
        raise Wrong(f"its shape {list(shape)} is larger than any value of a program: at most {MOST_BYTES} bytes on a rank")


def _check_sharding(sharding: Sharding, sizes: Mapping[str, int]) -> None:
    used = Counter(axis for _, _, part in sharding.parts() for axis in part.axes) + Counter(axis for axis, _ in sharding.partial)
    unknown = sorted(used.keys() - sizes.keys())
    if unknown:
        raise Wrong(f"{sharding} names the axis {unknown[0]}; the axes are {', '.join(sizes)}")
    twice = [axis for axis, times in used.items() if times > 1]
    if twice:
        raise Wrong(f"{sharding} uses the axis {twice[0]} twice")
    for _, _, part in sharding.parts():
        if not 0 <= part.size <= MOST_EXTENT:
            raise Wrong(f"{sharding}: {part.factor} has {part.size} positions; 0 to {MOST_EXTENT} are possible")
        if part.order and is_padded(part, sizes):
            raise Wrong(f"{sharding}: tiles of {part.factor} are padded, and lie in natural order only")
