"""Order: a value that an axis splits may lie in zigzag order along it (`meshc/ir/sharding.py`); its sharding says so.

    ("cp~zigzag",)         the axes of a part while it is decided who splits what: what is split so is split by another axis
    seq 4096/cp~zigzag     the part as types say it, whose axis is cp and whose order is zigzag

What treats each position by itself computes on either alike, so of what it makes no more than the order is said. In the per-rank program
the exchange of halves that a change of order is stands as a line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from meshc.ir.sharding import ZIGZAG, Part, Sharding

Key = TypeVar("Key")

_MARK: Final = f"~{ZIGZAG}"


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
    return _each(sharding, lambda part: replace(part, axes=plain(part.axes)))


def told(sharding: Sharding) -> Sharding:
    """The same as a value's type says it."""
    return _each(sharding, lambda part: replace(part, axes=plain(part.axes), order=ZIGZAG) if is_zigzag(part.axes[0]) else part)


def _each(sharding: Sharding, of: Callable[[Part], Part]) -> Sharding:
    if not turned(sharding):
        return sharding
    return replace(sharding, dims=tuple(tuple(of(part) if part.axes else part for part in parts) for parts in sharding.dims))
