"""Transfers of stored tensors between ranks, shardings and DTensor chunks; at most one tensor at a time is whole on a rank.

Every method is called on all ranks, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from meshc.ir import layouts
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Sharding, local_shape
from meshc.runtime.comm import collectives, reorder
from meshc.runtime.comm.groups import Groups


def whole_of(value: DTensor, world: dist.ProcessGroup | None) -> Tensor:
    """The whole tensor of a DTensor, on every rank. If its mesh has some ranks only (a pipeline stage's), the first of them broadcasts over
    `world`, the group of all ranks. Plain shards are gathered over `world` too, since a saved mesh may have no groups."""
    ranks = value.device_mesh.mesh.flatten().tolist()
    plain = value.device_mesh.mesh_dim_names is not None and all(type(place) in (Shard, Replicate) for place in value.placements)
    if len(ranks) == dist.get_world_size() and plain:
        mesh = Mesh.of(value.device_mesh)
        padded = layouts.pad_to(value.to_local(), layouts.largest_chunk(value.shape, value.placements, mesh))
        chunks = collectives.all_gather(padded.unsqueeze(0), world).wait()
        return layouts.put_chunks(((mesh.coordinates(rank), chunks[rank]) for rank in ranks), value.shape, value.placements, mesh)
    if len(ranks) == dist.get_world_size():
        return value.full_tensor()
    there = dist.get_rank() in ranks
    full = value.full_tensor().contiguous() if there else torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return collectives.broadcast(full, world, ranks[0]).wait()


class Transfers:
    """Scatter, gather and convert, for one rank of a mesh (None: not one of its own). `source` is the place in it of global rank 0."""

    def __init__(self, mesh: Mesh, groups: Groups, rank: int | None, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device
        self.sizes = axis_sizes(mesh)
        self.groups = groups
        if rank is not None:
            self.coordinates = mesh.coordinates(rank)
            self.source = mesh.ranks.index(0)
            self._place = mesh.ranks.index(rank)

    def scatter(self, value: Tensor | None, sharding: Sharding, dtype: torch.dtype) -> Tensor:
        """Each rank's tile of rank 0's `value`, which the other ranks need not have: a new tensor on the device."""
        group = self.over(self.mesh.names)
        axes = layouts.splitting_axes(sharding, self.mesh)
        root = None
        if self._place == self.source:
            assert value is not None
            root = value.detach().to(self.device, dtype)
        if group is None:
            assert root is not None
            return layouts.take_tile(root, sharding, self.sizes, self.coordinates)
        tile = torch.empty(local_shape(sharding, self.sizes), dtype=dtype, device=self.device)
        if not axes:
            if root is not None:
                tile.copy_(root)
            return collectives.broadcast(tile, group, self.source).wait()
        if root is None:
            return collectives.recv(tile, group, self.source).wait()
        tiles: dict[tuple[int, ...], Tensor] = {}
        works = []
        for place, rank in enumerate(self.mesh.ranks):
            at = self.mesh.coordinates(rank)
            key = tuple(at[axis] for axis in axes)
            if key not in tiles:
                tiles[key] = layouts.take_tile(root, sharding, self.sizes, at)
            if place != self._place:
                works.append(collectives.send(tiles[key], group, place))
        for work in works:
            work.wait()
        return tiles[tuple(self.coordinates[axis] for axis in axes)]

    def whole(self, tile: Tensor, sharding: Sharding) -> Tensor:
        """The whole tensor, on every rank; a view of the tile if nothing splits it."""
        return self.inside(tile, sharding)

    def inside(self, tile: Tensor, sharding: Sharding) -> Tensor:
        """The whole tensor on every rank of this mesh."""
        axes = self.splitting(sharding)
        if not axes:
            return tile.view(sharding.shape)
        return layouts.put_tiles(self._gather_pieces(tile, axes), sharding, self.sizes)

    def reshard(self, tile: Tensor, sharding: Sharding, wanted: Sharding) -> Tensor:
        """A new tensor: the tile under another sharding of the same shape."""
        if layouts.same_layout(sharding, wanted, self.mesh):
            return tile.clone()
        return layouts.take_tile(self.inside(tile, sharding), wanted, self.sizes, self.coordinates)

    def take_tile(self, full: Tensor, sharding: Sharding) -> Tensor:
        """This rank's tile of a whole tensor that it has."""
        return layouts.take_tile(full, sharding, self.sizes, self.coordinates)

    def splitting(self, sharding: Sharding) -> tuple[str, ...]:
        return layouts.splitting_axes(sharding, self.mesh)

    def to_chunk(self, tile: Tensor, sharding: Sharding) -> Tensor:
        """The live DTensor's local tensor: a view of the tile where the two are aligned, else of a new tensor."""
        if layouts.is_aligned(sharding, self.mesh):
            return layouts.tile_to_chunk(tile, sharding, self.mesh, self.coordinates)
        placements = layouts.torch_placements(sharding, self.mesh)
        return layouts.take_chunk(self.inside(tile, sharding), placements, self.mesh, self.coordinates)

    def to_tile(self, chunk: Tensor, sharding: Sharding) -> Tensor:
        """The program's tile of a live DTensor's local tensor, zero in the padding; the chunk itself if the two are equal."""
        if layouts.is_aligned(sharding, self.mesh):
            return layouts.pad_to(chunk, local_shape(sharding, self.sizes))
        full = self._join_chunks(chunk, sharding.shape, layouts.torch_placements(sharding, self.mesh), self.splitting(sharding))
        return layouts.take_tile(full, sharding, self.sizes, self.coordinates)

    def permute_rows(self, tile: Tensor, sharding: Sharding, source: Sequence[int]) -> Tensor:
        """A new tensor: the tile under the same sharding after row i of dim 0 has become row source[i]. Only rows that change ranks are
        sent, in one uneven all-to-all."""
        axes = self.splitting(Sharding((sharding.dims[0],)))
        here = tile.to(self.device)
        if not axes:
            return here.index_select(0, torch.tensor(source, dtype=torch.int64, device=self.device))
        group = self.over(axes)
        assert group is not None
        moves = reorder.moves(sharding.dims[0], axes, self.sizes, self.coordinates, source)
        made, me = torch.zeros_like(here, memory_format=torch.contiguous_format), group.rank()
        sent = [here[moves[me, other].taken] if other != me else here[:0] for other in range(group.size())]
        coming = [moves[other, me].put if other != me else [] for other in range(group.size())]
        work = collectives.all_to_all_pieces(sent, [(len(put), *here.shape[1:]) for put in coming], group)
        made[moves[me, me].put] = here[moves[me, me].taken]
        made[[row for put in coming for row in put]] = work.wait().view(-1, *here.shape[1:])
        return made

    def chunk_of(self, value: Tensor, placements: Sequence[Placement]) -> Tensor:
        """A value set by a user or a loader, as the local tensor of a DTensor with these placements (whole, if there are none).

        A DTensor may have any placements, on any mesh of these ranks; a plain tensor is the whole value, the same on all ranks.
        """
        if isinstance(value, DTensor):
            if value.device_mesh == self.mesh.device_mesh and tuple(value.placements) == tuple(placements):
                return value.to_local()
            value = self.full(value)
        return layouts.take_chunk(value, placements, self.mesh, self.coordinates) if placements else value

    def full(self, value: DTensor) -> Tensor:
        """The whole tensor of a DTensor, on every rank; plain shards on this mesh are gathered over groups of meshc's own."""
        placements = value.placements
        plain = all(type(place) in (Shard, Replicate) for place in placements)
        if value.device_mesh != self.mesh.device_mesh or self.mesh.world_size != dist.get_world_size() or not plain:
            return whole_of(value, self.groups.world)
        axes = [axis.name for axis, place in zip(self.mesh.axes, placements, strict=True) if axis.size > 1 and isinstance(place, Shard)]
        if not axes:
            return value.to_local()
        return self._join_chunks(value.to_local(), value.shape, placements, axes)

    def _join_chunks(self, chunk: Tensor, shape: Sequence[int], placements: Sequence[Placement], axes: Sequence[str]) -> Tensor:
        """The whole tensor of which each rank has a DTensor's local tensor."""
        padded = layouts.pad_to(chunk, layouts.largest_chunk(shape, placements, self.mesh))
        return layouts.put_chunks(self._gather_pieces(padded, axes), shape, placements, self.mesh)

    def _gather_pieces(self, x: Tensor, axes: Sequence[str]) -> Iterator[tuple[dict[str, int], Tensor]]:
        stacked = collectives.all_gather(x.unsqueeze(0), self.over(axes)).wait()
        for at, piece in zip(layouts.all_coordinates(axes, self.sizes), stacked, strict=True):
            yield self.coordinates | at, piece

    def over(self, axes: Sequence[str]) -> dist.ProcessGroup | None:
        """The group of the ranks that differ from this one along `axes` only; None if this rank is alone."""
        self.groups.prepare([axes])
        return self.groups.group(axes)
