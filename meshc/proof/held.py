"""Kinds of knowledge of a value while a graph is walked: tiles of a root, a call's results, a rank's integer, joined values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from meshc.proof.tiles import Tiles


@dataclass(frozen=True, slots=True)
class Several:
    """The results of a call with several."""

    number: int


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer that depends on the rank: how it is computed."""

    made: tuple[Any, ...]

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
        """The axes along which it is the rank's number, major to minor; None for other integers."""
        what, *rest = self.made
        if what == "coordinate":
            return (rest[0],)
        if what == "tile_start":
            size, counts, coordinates = rest
            rows = [one.axes(sizes) if isinstance(one, Integer) else None for one in coordinates]
            if None not in rows and all(len(row) == 1 for row in rows if row) and size == prod(counts):
                axes = tuple(axis for row in rows if row for axis in row)
                return axes if tuple(sizes[axis] for axis in axes) == counts else None
        return None


@dataclass(frozen=True, slots=True)
class JoinedValues:
    """Values that travel together: their concatenation along `dim`, which with `merged` also runs through the dim before it."""

    dim: int
    pieces: tuple[Tiles, ...]
    merged: bool = False


@dataclass(frozen=True, slots=True)
class OfRank:
    """What is another value on each rank along axes, in their order."""

    axes: tuple[str, ...]
    values: tuple[Held, ...]

    def index(self, sizes: Mapping[str, int]) -> Integer:
        """This rank's number among them."""
        coordinates = tuple(Integer(("coordinate", axis)) for axis in self.axes)
        counts = tuple(sizes[axis] for axis in self.axes)
        return coordinates[0] if len(coordinates) == 1 else Integer(("tile_start", prod(counts), counts, coordinates))


Held: TypeAlias = "Tiles | Several | Integer | JoinedValues | OfRank | int"
