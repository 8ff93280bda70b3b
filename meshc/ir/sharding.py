"""Where a value lies: for each dim its factors, for each factor the mesh axes that split it, and the axes it is still pending over.

A dim is a product of factors, major to minor. Axes split a factor one after the other, major to minor, each into equal padded tiles:
129 over 2 and 2 is 65, then 33, so every rank holds 33 positions, of which 33, 32, 33, 31 are real. Taking the innermost axis away
gives the layout of the rest, which is what makes a gather over one axis exact. What padding must hold is written in
`passes/partition/local.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from meshc.ir.likeness import like
from meshc.ir.sizes import braced


@dataclass(frozen=True)
class Part:
    """One factor's place in a dim: its name, its global size, and the axes that split it, major to minor."""

    factor: str
    size: int
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.factor} {braced(self.size)}" + "".join(f"/{axis}" for axis in self.axes)


@dataclass(frozen=True)
class Sharding:
    """The full assignment of a value. `pending` lists (axis, reduction), reductions being sum, max or min.

    `zero` holds the (dim, position) of parts whose padding is known to be zero; it says more about the same layout,
    so it takes no part in comparisons.
    """

    dims: tuple[tuple[Part, ...], ...] = ()
    pending: tuple[tuple[str, str], ...] = ()
    zero: frozenset[tuple[int, int]] = field(default=frozenset(), compare=False)

    def parts(self) -> Iterator[tuple[int, int, Part]]:
        """(dim, position in the dim, part) for every part."""
        for dim, parts in enumerate(self.dims):
            for position, part in enumerate(parts):
                yield dim, position, part

    def axes(self) -> set[str]:
        """Axes that split this value or that it is pending over."""
        return {axis for _, _, part in self.parts() for axis in part.axes} | {axis for axis, _ in self.pending}

    def split_axes(self) -> set[str]:
        """Axes that split this value."""
        return {axis for _, _, part in self.parts() for axis in part.axes}

    def pending_over(self, axis: str) -> str | None:
        """The reduction this value waits for over `axis`, or None."""
        return dict(self.pending).get(axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(prod(part.size for part in parts) for parts in self.dims)

    def whole(self) -> Sharding:
        """The same dims, split by nothing and pending over nothing."""
        return Sharding(tuple(tuple(like(part, axes=()) for part in parts) for parts in self.dims))

    def without_pending(self) -> Sharding:
        return like(self, pending=())

    def with_axes(self, dim: int, position: int, axes: tuple[str, ...]) -> Sharding:
        """The same sharding with the axes of one part replaced."""
        dims = [list(parts) for parts in self.dims]
        dims[dim][position] = like(dims[dim][position], axes=axes)
        return like(self, dims=tuple(tuple(parts) for parts in dims))

    def __str__(self) -> str:
        dims = ", ".join(" * ".join(map(str, parts)) or "1" for parts in self.dims)
        text = f"[{dims}]"
        if self.pending:
            text += " pending(" + ", ".join(f"{reduction}: {axis}" for axis, reduction in self.pending) + ")"
        return text


def tile_sizes(size: int, counts: Sequence[int]) -> list[int]:
    """Padded sizes of a factor after each split: `tile_sizes(129, [2, 2]) == [129, 65, 33]`."""
    sizes = [size]
    for count in counts:
        sizes.append(-(-sizes[-1] // count))
    return sizes


def tile_start(size: int, counts: Sequence[int], coordinates: Sequence[int]) -> int:
    """Global index of the first element of the tile at `coordinates` (may lie beyond `size` for an empty tile)."""
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
