"""Rows that change places between ranks, against the whole tensor's."""

from __future__ import annotations

import pytest
import torch

from meshc.ir import layouts
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding
from meshc.runtime.comm.reorder import moves, received_bytes


@pytest.mark.parametrize("mesh, axes", [("ep=2", ("ep",)), ("ep=3", ("ep",)), ("dp=2,ep=2", ("dp", "ep")), ("dp=2,ep=2", ("ep", "dp"))])
@pytest.mark.parametrize("rows", [8, 7, 4])
def test_tiles_that_exchange_rows_are_tiles_of_the_whole(mesh: str, axes: tuple[str, ...], rows: int) -> None:
    where = Mesh(mesh)
    sizes = axis_sizes(where)
    sharding = Sharding(((Part("experts", rows, axes),), (Part("hidden", 3),)))
    split = layouts.splitting_axes(sharding, where)
    full = torch.randn(rows, 3)
    source = torch.randperm(rows, generator=torch.Generator().manual_seed(rows)).tolist()
    ranks = [*layouts.all_coordinates(split, sizes)]
    tiles = [layouts.take_tile(full, sharding, sizes, at) for at in ranks]
    made = [torch.zeros_like(tile) for tile in tiles]
    found = moves(sharding.dims[0], split, sizes, dict.fromkeys(sizes, 0), source)
    for (teller, rank), move in found.items():
        made[rank][move.put] = tiles[teller][move.taken]
    for at, tile in zip(ranks, made, strict=True):
        assert torch.equal(tile, layouts.take_tile(full[source], sharding, sizes, at))
    most = max(sum(len(move.put) for (teller, rank), move in found.items() if rank == me != teller) for me in range(len(ranks)))
    assert received_bytes(sharding, where, source, 4) == most * 3 * 4


def test_what_stays_is_not_sent() -> None:
    sharding = Sharding(((Part("experts", 4, ("ep",)),), (Part("ffn", 6, ("tp",)),)))
    where = Mesh("ep=2,tp=2")
    assert received_bytes(sharding, where, [0, 1, 2, 3], 8) == received_bytes(sharding, where, [1, 0, 2, 3], 8) == 0
    assert received_bytes(sharding, where, [0, 3, 2, 1], 8) == 3 * 8
    assert received_bytes(layouts.whole_sharding((4, 6)), where, [3, 2, 1, 0], 8) == 0
