"""Allocation of a stored tensor: its memory on this rank, and the DTensor over it.

    shared      the DTensor's local tensor is the program's buffer, or a view of all but its padding
    otherwise   a copy in torch's layout
    offloaded      both on the rank's host, in memory or in a file
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshc.ir import layouts
from meshc.ir.keys import name_of
from meshc.ir.sharding import Sharding
from meshc.ir.storage_moves import Storage
from meshc.runtime.comm.disk import COPIES
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.comm.transfers import Transfers
from meshc.runtime.state.stored_tensor import StoredTensor


def allocate_stored_tensor(
    key: str, sharding: Sharding, shape: tuple[int, ...], dtype: torch.dtype, tile: Tensor | None, home: Transfers, device: torch.device, *,
    distributed: bool, storage: Storage,
) -> StoredTensor:  # fmt: skip
    """A stored tensor of this rank's `tile`, of zeros without one. The other parameters are those of `Store.hold`."""
    elsewhere = distributed and isinstance(home, StageTransfers) and not home.member
    if tile is None:
        tile = torch.zeros((0,) if elsewhere else layouts.local_shape(sharding, home.sizes), dtype=dtype, device=device)
    copy = COPIES.get(storage)
    if copy is not None:
        tile = copy(tile, name_of(key), device)
    live = local = tile
    placements: tuple[Placement, ...] = ()
    shares = not distributed or layouts.shares_memory(sharding, home.mesh)
    if distributed:
        placements, local = layouts.torch_placements(sharding, home.mesh), home.to_chunk(tile, sharding)
        if not shares:
            local = local.clone(memory_format=torch.contiguous_format) if copy is None else copy(local, name_of(key), device)
        live = _wrap_dtensor(local, shape, placements, home, device)
    held = StoredTensor(key, name_of(key), shape, dtype, sharding, tile, live, local, placements, shares or elsewhere, home)
    held.storage = storage
    held.lags = not distributed and isinstance(home, StageTransfers)
    return held


def _wrap_dtensor(
    local: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...], home: Transfers, device: torch.device
) -> DTensor:
    """The DTensor whose local tensor is `local`."""
    offloaded = local.device.type != device.type
    under = local.to("meta") if offloaded else local  # torch would move it to the mesh's device
    seen = layouts.dtensor_of(under, home.mesh.device_mesh, placements, shape)
    return DTensor(local, seen._spec, requires_grad=False) if offloaded else seen
