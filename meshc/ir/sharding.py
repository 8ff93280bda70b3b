"""Sharding of a value: the factors of each dim, the mesh axes that split each factor, and the axes the value is partial over.

A dim is a product of factors, major to minor. Axes split a factor one after the other, major to minor, each into equal padded tiles:
129 over 2 and 2 is 65, then 33, so every rank holds 33 positions, of which 33, 32, 33, 31 are real. Taking the innermost axis away
gives the layout of the rest, which is what makes a gather over one axis exact. What padding must hold is written in
`passes/partition/operator_lowering.py`.

The tiles of the first axis may be in another order than that of their positions, which then is part of the sharding:

    seq 4096/cp            rank r of n has tile r
    seq 4096/cp~zigzag     rank r has the first half of tile r and the second half of tile n - 1 - r, the earlier one first: of 16 over 2,
                           0-3 4-7 | 8-11 12-15 is 0-3 12-15 | 4-7 8-11
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final

from meshc.ir.likeness import like
from meshc.ir.sizes import braced_text

ZIGZAG: Final = "zigzag"
ORDERS: Final = (ZIGZAG,)
"""Orders of tiles beside the natural one."""


@dataclass(frozen=True)
class Part:
    """One factor of a dim: its name, its global size, the axes that split it, major to minor, and the order of the first axis's tiles
    (one of `ORDERS`), if it is not that of their positions."""

    factor: str
    size: int
    axes: tuple[str, ...] = ()
    order: str = ""

    @property
    def cuts(self) -> tuple[str, ...]:
        """The axes, the first with the order of its tiles: `cp~zigzag`. Equal cuts of equal parts give a rank the same positions."""
        return (f"{self.axes[0]}~{self.order}", *self.axes[1:]) if self.order else self.axes

    def __str__(self) -> str:
        return f"{self.factor} {braced_text(self.size)}" + "".join(f"/{cut}" for cut in self.cuts)


@dataclass(frozen=True)
class Sharding:
    """The full assignment of a value. `partial` lists (axis, reduction), the name in `reductions.py`.

    `zero` holds the (dim, position) of parts whose padding is known to be zero; it does not change the sharding, so it takes no part in
    comparisons.
    """

    dims: tuple[tuple[Part, ...], ...] = ()
    partial: tuple[tuple[str, str], ...] = ()
    zero: frozenset[tuple[int, int]] = field(default=frozenset(), compare=False)

    def parts(self) -> Iterator[tuple[int, int, Part]]:
        """(dim, position in the dim, part) for every part."""
        for dim, parts in enumerate(self.dims):
            for position, part in enumerate(parts):
                yield dim, position, part

    def axes(self) -> set[str]:
        """Axes that split this value or that it is partial over."""
        return self.split_axes() | {axis for axis, _ in self.partial}

    def split_axes(self) -> set[str]:
        """Axes that split this value."""
        return {axis for _, _, part in self.parts() for axis in part.axes}

    def partial_over(self, axis: str) -> str | None:
        """The reduction over `axis` that is still to be done, or None."""
        return dict(self.partial).get(axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(prod(part.size for part in parts) for parts in self.dims)

    def whole(self) -> Sharding:
        """The same dims, split by nothing and partial over nothing."""
        return Sharding(tuple(tuple(like(part, axes=(), order="") for part in parts) for parts in self.dims))

    def without_partial(self) -> Sharding:
        return like(self, partial=())

    def with_axes(self, dim: int, position: int, axes: tuple[str, ...]) -> Sharding:
        """The same sharding with the axes of one part replaced; another first axis has its tiles in natural order."""
        dims = [list(parts) for parts in self.dims]
        part = dims[dim][position]
        dims[dim][position] = like(part, axes=axes, order=part.order if axes[:1] == part.axes[:1] else "")
        return like(self, dims=tuple(tuple(parts) for parts in dims))

    def __str__(self) -> str:
        dims = ", ".join(" * ".join(map(str, parts)) or "1" for parts in self.dims)
        text = f"[{dims}]"
        if self.partial:
            text += " partial(" + ", ".join(f"{reduction}: {axis}" for axis, reduction in self.partial) + ")"
        return text


def zigzag_halves(size: int, count: int, place: int) -> list[tuple[int, int]]:
    """(first position, length) of both halves that the rank at `place` of `count` has in zigzag order; of a tile of odd length the first
    half is the longer one. Tiles are not padded: `zigzag_halves(16, 2, 1) == [(4, 4), (8, 4)]`."""
    tile = size // count
    keep = tile - tile // 2
    return sorted([(place * tile, keep), ((count - 1 - place) * tile + keep, tile - keep)])


def tile_sizes(size: int, counts: Sequence[int]) -> list[int]:
    """Padded sizes of a factor after each split: `tile_sizes(129, [2, 2]) == [129, 65, 33]`."""
    sizes = [size]
    for count in counts:
        sizes.append(-(-sizes[-1] // count))
    return sizes


def tile_start(size: int, counts: Sequence[int], coordinates: Sequence[int]) -> int:
    """Global index of the first element of the tile at `coordinates` (may be beyond `size` for an empty tile)."""
    sizes = tile_sizes(size, counts)
    return sum(step * coordinate for step, coordinate in zip(sizes[1:], coordinates, strict=True))


def tile_count(size: int, counts: Sequence[int], coordinates: Sequence[int]) -> int:
    """Number of real (not padding) elements in the tile at `coordinates`."""
    valid = size
    for step, coordinate in zip(tile_sizes(size, counts)[1:], coordinates, strict=True):
        valid = max(0, min(valid - coordinate * step, step))
    return valid


def local_size(part: Part, sizes: Mapping[str, int]) -> int:
    """Padded size of a part on each rank; `sizes` maps axis to size."""
    return tile_sizes(part.size, [sizes[axis] for axis in part.axes])[-1]


def local_shape(sharding: Sharding, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Padded shape on each rank, the same on all ranks."""
    return tuple(prod(local_size(part, sizes) for part in parts) for parts in sharding.dims)


def part_shape(sharding: Sharding, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Padded local shape with every part as a dim of its own."""
    return tuple(local_size(part, sizes) for _, _, part in sharding.parts())


def is_padded(part: Part, sizes: Mapping[str, int]) -> bool:
    """Whether the tiles of this part hold padding on some rank."""
    return local_size(part, sizes) * prod(sizes[axis] for axis in part.axes) != part.size


def padded_parts(sharding: Sharding, sizes: Mapping[str, int]) -> list[tuple[int, int, Part]]:
    return [(dim, position, part) for dim, position, part in sharding.parts() if is_padded(part, sizes)]
