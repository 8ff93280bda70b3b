"""Conversion between the program's padded tiles of a stored tensor and the chunks of DTensor placements. Pure, no communication.

    129 over 2 and 2:  the program's tiles    33 of 33, 32 of 33, 33 of 33, 31 of 33    (equal sizes; the rest is padding)
                       torch's nested chunks  33, 32, 32, 32                            (no padding; sizes differ)

A *tile* is what the program holds on a rank, a *chunk* what a DTensor holds there. Tiles may be strided (heads within a fused dim), chunks
are contiguous ranges. `coordinates` maps each mesh axis to a rank's place on it; `sizes` maps axes to their sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding, local_shape, part_shape, tile_count, tile_start, zigzag_halves

Coordinates = Mapping[str, int]
Range = tuple[int, int]
"""(start, length) within a dim."""


def whole_sharding(shape: Iterable[int]) -> Sharding:
    """The sharding of a tensor that every rank holds whole."""
    return Sharding(tuple((Part("", size),) for size in shape))


def splitting_axes(sharding: Sharding, mesh: Mesh) -> tuple[str, ...]:
    """The axes, of more than one rank, that split a value; in mesh order."""
    split = sharding.split_axes()
    return tuple(axis.name for axis in mesh.axes if axis.name in split and axis.size > 1)


def all_coordinates(axes: Sequence[str], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every combination over `axes`, the first varying slowest: the order of a group's members."""
    for at in itertools.product(*(range(sizes[axis]) for axis in axes)):
        yield dict(zip(axes, at, strict=True))


# The program's tiles.


def _real(sharding: Sharding, sizes: Mapping[str, int], coordinates: Coordinates) -> list[Range]:
    """For every part, the range of positions in the tile at `coordinates`, padding excluded."""
    ranges = []
    for _, _, part in sharding.parts():
        counts = [sizes[axis] for axis in part.axes]
        at = [coordinates[axis] for axis in part.axes]
        ranges.append((min(tile_start(part.size, counts, at), part.size), tile_count(part.size, counts, at)))
    return ranges


def _narrow(x: Tensor, ranges: Iterable[Range]) -> Tensor:
    for dim, (start, length) in enumerate(ranges):
        x = x.narrow(dim, start, length)
    return x


def _front(x: Tensor, ranges: Iterable[Range]) -> Tensor:
    """The first positions of each dim, as many as its range has."""
    return _narrow(x, ((0, length) for _, length in ranges))


def take_tile(full: Tensor, sharding: Sharding, sizes: Mapping[str, int], coordinates: Coordinates) -> Tensor:
    """The padded tile of a whole tensor at `coordinates`: a new contiguous tensor of `local_shape`, zero in the padding."""
    ranges = _real(sharding, sizes, coordinates)
    full = full.reshape([part.size for _, _, part in sharding.parts()])
    for dim, order in _orders(sharding, sizes):
        full = full.index_select(dim, order.to(full.device))
    tile = full.new_zeros(part_shape(sharding, sizes))
    _front(tile, ranges).copy_(_narrow(full, ranges))
    return tile.view(local_shape(sharding, sizes))


def put_tiles(tiles: Iterable[tuple[Coordinates, Tensor]], sharding: Sharding, sizes: Mapping[str, int]) -> Tensor:
    """The whole tensor that these tiles make up, one for each combination of the axes that split it."""
    tiles = list(tiles)
    full = tiles[0][1].new_empty([part.size for _, _, part in sharding.parts()])
    local = part_shape(sharding, sizes)
    for coordinates, tile in tiles:
        ranges = _real(sharding, sizes, coordinates)
        _narrow(full, ranges).copy_(_front(tile.reshape(local), ranges))
    for dim, order in _orders(sharding, sizes):
        full = full.index_select(dim, torch.argsort(order).to(full.device))
    return full.reshape(sharding.shape)


def _orders(sharding: Sharding, sizes: Mapping[str, int]) -> Iterator[tuple[int, Tensor]]:
    """(dim, permutation) of each part in zigzag order: its positions in the order of the ranks' concatenated tiles."""
    for dim, (_, _, part) in enumerate(sharding.parts()):
        if part.order:
            count = sizes[part.axes[0]]
            halves = [half for place in range(count) for half in zigzag_halves(part.size, count, place)]
            yield dim, torch.cat([torch.arange(start, start + length) for start, length in halves])


def same_layout(one: Sharding, other: Sharding, mesh: Mesh) -> bool:
    """Whether every rank holds the same elements at the same places under both shardings, factor names aside."""
    if one.shape != other.shape or splitting_axes(one, mesh) != splitting_axes(other, mesh):
        return False
    sizes = axis_sizes(mesh)
    return all(_bare(a) == _bare(b) or _same_dim(_bare(a), _bare(b), mesh, sizes) for a, b in zip(one.dims, other.dims, strict=True))


def _same_dim(one: tuple[Part, ...], other: tuple[Part, ...], mesh: Mesh, sizes: Mapping[str, int]) -> bool:
    axes = splitting_axes(Sharding((one, other)), mesh)
    zeros = dict.fromkeys(sizes, 0)
    for at in all_coordinates(axes, sizes):
        places = [places_of(parts, sizes, zeros | at) for parts in (one, other)]
        if not torch.equal(*places):
            return False
    return True


def places_of(parts: tuple[Part, ...], sizes: Mapping[str, int], coordinates: Coordinates) -> Tensor:
    """For each position of a dim's tile the global position it holds, counted from 1; 0 in the padding."""
    sharding = Sharding((parts,))
    return take_tile(torch.arange(1, sharding.shape[0] + 1), sharding, sizes, coordinates)


def _bare(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The parts without names and without unsplit parts of size 1, which do not matter: equal layers compare equal."""
    return tuple(replace(part, factor="") for part in parts if part.size > 1 or part.axes)


# torch's chunks.


def chunk_ranges(shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh, coordinates: Coordinates) -> list[Range]:
    """For every dim the range of a DTensor's local tensor: each mesh axis in turn cuts what the ones before it left."""
    ranges = [(0, size) for size in shape]
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard):
            start, length = ranges[placement.dim]
            step = -(-length // axis.size)
            skipped = min(step * coordinates[axis.name], length)
            ranges[placement.dim] = (start + skipped, min(step, length - skipped))
    return ranges


def take_chunk(full: Tensor, placements: Sequence[Placement], mesh: Mesh, coordinates: Coordinates) -> Tensor:
    """A DTensor's local tensor of a whole tensor: a view."""
    return _narrow(full, chunk_ranges(full.shape, placements, mesh, coordinates))


def put_chunks(
    chunks: Iterable[tuple[Coordinates, Tensor]], shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh
) -> Tensor:
    """The whole tensor that these chunks make up. A chunk may be larger than it should be: what is beyond its length is ignored."""
    chunks = list(chunks)
    full = chunks[0][1].new_empty(tuple(shape))
    for coordinates, chunk in chunks:
        ranges = chunk_ranges(shape, placements, mesh, coordinates)
        _narrow(full, ranges).copy_(_front(chunk, ranges))
    return full


def largest_chunk(shape: Sequence[int], placements: Sequence[Placement], mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest chunk, which is the first rank's."""
    return tuple(length for _, length in chunk_ranges(shape, placements, mesh, dict.fromkeys(mesh.names, 0)))


@lru_cache(maxsize=4096)
def torch_placements(sharding: Sharding, mesh: Mesh) -> tuple[Placement, ...]:
    """The placements of the live DTensor, on the root mesh: `Shard(d)` for each axis that splits dim d, whichever factor it splits.

    A rank holds as much as under `sharding`, give or take the padding, but not always the same elements: see `is_aligned`. Only plain
    `Shard` and `Replicate`, which torch can write to a checkpoint and reload under another mesh.
    """
    dims = {axis: dim for dim, _, part in sharding.parts() for axis in part.axes}
    return tuple(Shard(dims[axis.name]) if axis.name in dims and axis.size > 1 else Replicate() for axis in mesh.axes)


def placements(sharding: Sharding, mesh: Mesh) -> tuple[Placement, ...] | None:
    """The placements that describe `sharding` exactly, tiles without padding included; None if there are none."""
    sizes = axis_sizes(mesh)
    even = prod(local_shape(sharding, sizes)) * prod(sizes[axis] for axis in splitting_axes(sharding, mesh)) == prod(sharding.shape)
    return torch_placements(sharding, mesh) if even and is_aligned(sharding, mesh) else None


@lru_cache(maxsize=4096)  # asked for every key and value of a cache at every token
def is_aligned(sharding: Sharding, mesh: Mesh) -> bool:
    """Whether on every rank the chunk under `torch_placements` is the beginning of the tile, and padding is all that the tile has more."""
    return _dims_are_aligned(tuple(map(_bare, sharding.dims)), mesh)


@lru_cache(maxsize=4096)
def _dims_are_aligned(dims: tuple[tuple[Part, ...], ...], mesh: Mesh) -> bool:
    sizes = axis_sizes(mesh)
    zeros = dict.fromkeys(sizes, 0)
    for parts in dims:
        one = Sharding((parts,))
        chunks = torch_placements(one, mesh)
        for at in all_coordinates(splitting_axes(one, mesh), sizes):
            places = places_of(parts, sizes, zeros | at)
            ((start, length),) = chunk_ranges(one.shape, chunks, mesh, zeros | at)
            if not torch.equal(places[:length], torch.arange(start + 1, start + length + 1)) or places[length:].any():
                return False
    return True


def shares_memory(sharding: Sharding, mesh: Mesh) -> bool:
    """Whether the chunk can be a contiguous view of the tile on every rank: `is_aligned`, and padded in the first dim only."""
    if not is_aligned(sharding, mesh):
        return False
    local = local_shape(sharding, axis_sizes(mesh))
    for dim, parts in enumerate(sharding.dims):
        one = Sharding((parts,))
        padded = local[dim] * prod(mesh.size(axis) for axis in splitting_axes(one, mesh)) != one.shape[0]
        if padded and prod(local[:dim]) != 1:
            return False
    return True


def tile_to_chunk(tile: Tensor, sharding: Sharding, mesh: Mesh, coordinates: Coordinates) -> Tensor:
    """The chunk as a view of an aligned tile."""
    return _front(tile, chunk_ranges(sharding.shape, torch_placements(sharding, mesh), mesh, coordinates))


def pad_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x`, with zeros behind its end in every dim where `shape` is larger."""
    if tuple(x.shape) == tuple(shape):
        return x
    padded = x.new_zeros(tuple(shape))
    _narrow(padded, ((0, length) for length in x.shape)).copy_(x)
    return padded


# DTensors over what a rank has.


def dtensor_of(local: Tensor, mesh: DeviceMesh | None, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The contiguous DTensor of this shape whose part on this rank is `local`. Of a part alone torch would guess the shape, wrongly where
    parts are uneven."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def dtensor_of_whole(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """The DTensor of a tensor that every rank has whole."""
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
