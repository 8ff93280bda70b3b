"""Transfers of stored tensors of one pipeline stage, which exist on the ranks of that stage only.

    mesh dp=2, pp=2      a parameter of stage 1:  a DTensor on the ranks with pp=1; on the others its local tensor is empty

Every method is called on all ranks of the mesh. Transfers within a stage involve its ranks only; `scatter` and `whole` involve all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Sharding
from meshc.runtime.comm import collectives
from meshc.runtime.comm.transfers import Transfers


class StageTransfers(Transfers):
    """`root` moves tensors on the whole mesh; `at` is the coordinate of the stage's ranks on `axis`."""

    def __init__(self, root: Transfers, submesh: Mesh, axis: str, at: int) -> None:
        super().__init__(submesh, root.groups, None, root.device)
        self.root, self.axis, self.at = root, axis, at
        self.coordinates = {**root.coordinates, axis: 0}
        self.member = root.coordinates[axis] == at

    def scatter(self, value: Tensor | None, sharding: Sharding, dtype: torch.dtype) -> Tensor:
        tile = self.root.scatter(value, sharding, dtype)
        return tile if self.member else self.nothing(dtype)

    def whole(self, tile: Tensor, sharding: Sharding) -> Tensor:
        full = self.inside(tile, sharding)
        if not self.member:
            full = torch.empty(sharding.shape, dtype=tile.dtype, device=self.device)
        return self.to_all(full.contiguous())

    def to_all(self, value: Tensor) -> Tensor:
        """Broadcasts `value` from the stage's ranks to all, in place; all ranks pass tensors of one shape."""
        sent = value.to(self.device)
        collectives.broadcast(sent, self.over([self.axis]), self.at).wait()
        return value if sent is value else value.copy_(sent)

    def inside(self, tile: Tensor, sharding: Sharding) -> Tensor:
        return super().inside(tile, sharding) if self._takes_part(sharding) else tile

    def reshard(self, tile: Tensor, sharding: Sharding, wanted: Sharding) -> Tensor:
        return super().reshard(tile, sharding, wanted) if self._takes_part(sharding) else tile.clone()

    def permute_rows(self, tile: Tensor, sharding: Sharding, source: Sequence[int]) -> Tensor:
        there = self._takes_part(Sharding((sharding.dims[0],)))
        return super().permute_rows(tile, sharding, source) if there else tile

    def to_chunk(self, tile: Tensor, sharding: Sharding) -> Tensor:
        return super().to_chunk(tile, sharding) if self._takes_part(sharding) else tile

    def to_tile(self, chunk: Tensor, sharding: Sharding) -> Tensor:
        return super().to_tile(chunk, sharding) if self._takes_part(sharding) else chunk

    def chunk_of(self, value: Tensor, placements: Sequence[Placement]) -> Tensor:
        chunk = super().chunk_of(value, placements)
        return chunk if self.member or not placements else self.nothing(value.dtype)

    def take_tile(self, full: Tensor, sharding: Sharding) -> Tensor:
        return super().take_tile(full, sharding) if self.member else self.nothing(full.dtype)

    def nothing(self, dtype: torch.dtype) -> Tensor:
        """The empty tensor that a rank of another stage holds."""
        return torch.empty(0, dtype=dtype, device=self.device)

    def _takes_part(self, sharding: Sharding) -> bool:
        """Whether this rank is one of the stage's. Creates the groups first, which takes all ranks."""
        self.over(self.splitting(sharding))
        return self.member


def of_stages(root: Transfers, axis: str) -> Mapping[int, StageTransfers]:
    """Coordinate of the pipeline axis -> transfers of its stage. All ranks call this."""
    mesh = root.mesh
    whole = mesh.device_mesh
    assert whole is not None
    dim = mesh.names.index(axis)
    found = {}
    for at in range(mesh.size(axis)):
        ranks = whole.mesh.narrow(dim, at, 1)
        part = Mesh.of(DeviceMesh(mesh.device_type, ranks, mesh_dim_names=tuple(mesh.names)))
        found[at] = StageTransfers(root, part, axis, at)
    return found
