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
from meshc.runtime.comm import disk, host
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.comm.transfers import Transfers
from meshc.runtime.state.stored_tensor import StoredTensor


def allocate_stored_tensor(
    key: str, sharding: Sharding, shape: tuple[int, ...], dtype: torch.dtype, tile: Tensor | None, home: Transfers, device: torch.device, *,
    distributed: bool, offloaded: bool, on_disk: bool,
) -> StoredTensor:  # fmt: skip
    """A stored tensor of this rank's `tile`, of zeros without one. The other parameters are those of `Store.hold`."""
    elsewhere = distributed and isinstance(home, StageTransfers) and not home.member
    if tile is None:
        tile = torch.zeros((0,) if elsewhere else layouts.local_shape(sharding, home.sizes), dtype=dtype, device=device)
    if offloaded:
        tile = _move_to_host(tile, key, device, on_disk)
    live = local = tile
    placements: tuple[Placement, ...] = ()
    shares = not distributed or layouts.shares_memory(sharding, home.mesh)
    if distributed:
        placements, local = layouts.torch_placements(sharding, home.mesh), home.to_chunk(tile, sharding)
        if not shares:
            local = _move_to_host(local, key, device, on_disk) if offloaded else local.clone(memory_format=torch.contiguous_format)
        live = _wrap_dtensor(local, shape, placements, home, device)
    held = StoredTensor(key, name_of(key), shape, dtype, sharding, tile, live, local, placements, shares or elsewhere, home)
    held.offloaded, held.on_disk = offloaded, on_disk
    held.lags = not distributed and isinstance(home, StageTransfers)
    return held


def _wrap_dtensor(
    local: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...], home: Transfers, device: torch.device
) -> DTensor:
    """The DTensor whose local tensor is `local`."""
    offloaded = local.device.type != device.type
    under = local.to("meta") if offloaded else local  # torch would move it to the mesh's device
    stride = torch.empty(shape, device="meta").stride()
    seen = DTensor.from_local(under, home.mesh.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return DTensor(local, seen._spec, requires_grad=False) if offloaded else seen


def _move_to_host(value: Tensor, key: str, device: torch.device, on_disk: bool) -> Tensor:
    """A copy of `value` on the rank's host, in memory or in a file."""
    return disk.copy_to_disk(value, name_of(key)) if on_disk else host.copy_to_host(value, device)
