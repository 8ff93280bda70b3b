"""Tiles and chunks, with all ranks of a mesh in this process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from meshc.ir import layouts
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.testing import rank_tiles as expected

MESH = Mesh("dp=2,tp=2")
SIZES = {"dp": 2, "tp": 2}
RANKS = [MESH.coordinates(rank) for rank in MESH.ranks]


def dim(*parts: str) -> tuple[Part, ...]:
    """`dim("heads 4/tp", "head 8")`"""
    read = []
    for part in parts:
        factor, _, rest = part.partition(" ")
        size, *axes = rest.split("/")
        read.append(Part(factor, int(size), tuple(axes)))
    return tuple(read)


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)


def test_129_over_2_and_2() -> None:
    uneven = Sharding((dim("n 129/dp/tp"),))
    tiles = [layouts.take_tile(counted(129), uneven, SIZES, at) for at in RANKS]
    assert [tile.numel() for tile in tiles] == [33] * 4
    assert [int((tile > 0).sum()) for tile in tiles] == [33, 32, 33, 31]
    chunks = [layouts.take_chunk(counted(129), layouts.torch_placements(uneven, MESH), MESH, at) for at in RANKS]
    assert [chunk.numel() for chunk in chunks] == [33, 32, 32, 32]
    assert layouts.placements(uneven, MESH) is None
    assert not layouts.is_aligned(uneven, MESH)


def test_129_over_one_axis_of_4_needs_no_communication() -> None:
    mesh = Mesh("tp=4")
    uneven = Sharding((dim("n 129/tp"), dim("m 3")))
    assert layouts.placements(uneven, mesh) is None
    assert layouts.is_aligned(uneven, mesh) and layouts.shares_memory(uneven, mesh)
    sizes = [layouts.tile_to_chunk(torch.zeros(33, 3), uneven, mesh, mesh.coordinates(rank)).shape[0] for rank in range(4)]
    assert sizes == [33, 33, 33, 30]
    columns = Sharding((dim("m 3"), dim("n 129/tp")))
    assert layouts.is_aligned(columns, mesh) and not layouts.shares_memory(columns, mesh)


@pytest.mark.parametrize(
    "dims, placements",
    [
        ((dim("n 8/dp"), dim("m 6/tp")), (Shard(0), Shard(1))),
        ((dim("n 8/dp/tp"), dim("m 6")), (Shard(0), Shard(0))),
        ((dim("n 8"), dim("m 6/tp")), (Replicate(), Shard(1))),
        ((dim("heads 4/tp", "head 2"), dim("m 6")), (Replicate(), Shard(0))),
        ((dim("heads 2/dp", "head 4/tp"), dim("m 6")), (Shard(0), Shard(0))),  # one head a rank: contiguous
        ((dim("n 8/tp/dp"), dim("m 6")), None),  # not in mesh order
        ((dim("qkv 3", "heads 4/tp"), dim("m 6")), None),  # strided
        ((dim("heads 4/dp", "head 2/tp"), dim("m 6")), None),
        ((dim("n 7/tp"), dim("m 6")), None),  # uneven
    ],
)
def test_placements(dims: tuple[tuple[Part, ...], ...], placements: object) -> None:
    assert layouts.placements(Sharding(dims), MESH) == placements


def test_an_axis_of_one_rank_splits_nothing() -> None:
    mesh = Mesh("dp=1,tp=2")
    assert layouts.placements(Sharding((dim("qkv 3", "heads 4/dp"), dim("m 7/dp"))), mesh) == (Replicate(), Replicate())


def test_fused_heads_stay_split_in_torchs_layout() -> None:
    fused = Sharding((dim("hidden 8"), dim("qkv 3", "heads 4/tp", "head 2")))
    assert layouts.torch_placements(fused, MESH) == (Replicate(), Shard(1))
    full = counted(8, 24)
    tile = layouts.take_tile(full, fused, SIZES, {"dp": 0, "tp": 1})
    assert torch.equal(tile, full.view(8, 3, 2, 4)[:, :, 1].reshape(8, 12))


def test_same_layout_does_not_look_at_names_or_at_how_a_whole_dim_is_refined() -> None:
    heads = Sharding((dim("heads 12/tp", "head 64"),))
    assert layouts.same_layout(heads, Sharding((dim("n 768/tp"),)), MESH)
    assert not layouts.same_layout(heads, Sharding((dim("n 768/dp"),)), MESH)
    assert not layouts.same_layout(heads, Sharding((dim("heads 12", "head 64/tp"),)), MESH)
    assert not layouts.same_layout(Sharding((dim("n 7/tp/dp"),)), Sharding((dim("n 7/dp/tp"),)), MESH)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Sharding, Mesh]:
    mesh = Mesh.from_axes([("a", draw(st.integers(1, 3))), ("b", draw(st.integers(1, 3))), ("c", 2)])
    free = list(draw(st.permutations(["a", "b", "c"])))
    dims = []
    for _ in range(draw(st.integers(1, 2))):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            take = draw(st.integers(0, len(free)))
            parts.append(Part("f", draw(st.integers(1, 5)), tuple(free[:take])))
            del free[:take]
        dims.append(tuple(parts))
    return Sharding(tuple(dims)), mesh


@settings(max_examples=150)
@given(shardings())
def test_round_trips(case: tuple[Sharding, Mesh]) -> None:
    sharding, mesh = case
    sizes = axis_sizes(mesh)
    full = counted(*sharding.shape)
    ranks = [mesh.coordinates(rank) for rank in mesh.ranks]
    tiles = [(at, layouts.take_tile(full, sharding, sizes, at)) for at in ranks]
    assert all(tuple(tile.shape) == local_shape(sharding, sizes) for _, tile in tiles)
    assert torch.equal(layouts.put_tiles([(at, tile.masked_fill(tile == 0, float("nan"))) for at, tile in tiles], sharding, sizes), full)

    placements = layouts.torch_placements(sharding, mesh)
    largest = layouts.largest_chunk(sharding.shape, placements, mesh)
    chunks = [(at, layouts.take_chunk(full, placements, mesh, at)) for at in ranks]
    assert all(length <= most for _, chunk in chunks for length, most in zip(chunk.shape, largest, strict=True))
    padded = [(at, layouts.pad_to(chunk, largest)) for at, chunk in chunks]
    assert torch.equal(layouts.put_chunks(padded, full.shape, placements, mesh), full)
    if layouts.is_aligned(sharding, mesh):
        for (at, tile), (_, chunk) in zip(tiles, chunks, strict=True):
            view = layouts.tile_to_chunk(tile, sharding, mesh, at)
            assert torch.equal(view, chunk) and torch.equal(layouts.pad_to(chunk, tile.shape), tile)
            assert view.is_contiguous() or not layouts.shares_memory(sharding, mesh)
    if layouts.placements(sharding, mesh) is not None:
        assert all(torch.equal(tile, chunk) for (_, tile), (_, chunk) in zip(tiles, chunks, strict=True))


@settings(max_examples=50)
@given(shardings())
def test_chunks_are_torchs_own(case: tuple[Sharding, Mesh]) -> None:
    """Against `torch.chunk`, applied once for each mesh axis; beyond the last chunk there is nothing."""
    sharding, mesh = case
    full = counted(*sharding.shape)
    placements = layouts.torch_placements(sharding, mesh)
    for rank in mesh.ranks:
        at = mesh.coordinates(rank)
        want = full
        for axis, placement in zip(mesh.axes, placements, strict=True):
            if isinstance(placement, Shard):
                pieces = want.chunk(axis.size, placement.dim) if want.shape[placement.dim] else ()
                place = at[axis.name]
                want = pieces[place] if place < len(pieces) else want.narrow(placement.dim, 0, 0)
        assert torch.equal(layouts.take_chunk(full, placements, mesh, at), want)


def test_tiles_in_zigzag_order_are_halves_of_two() -> None:
    """As `meshc.testing.rank_tiles`, which knows nothing of these, has them; a tile of odd length has the longer half of its own."""
    for size, axes in ((12, ("a",)), (9, ("a",)), (24, ("a", "b"))):
        sharding = Sharding(((Part("rows", 2),), (Part("seq", size, axes, "zigzag"), Part("inner", 2))))
        mesh = Mesh("a=3,b=2")
        full = counted(2, size * 2)
        tiles = [(mesh.coordinates(rank), tile) for rank, tile in zip(mesh.ranks, expected.tiles(full, sharding, mesh), strict=True)]
        assert all(torch.equal(layouts.take_tile(full, sharding, axis_sizes(mesh), at), tile) for at, tile in tiles)
        assert torch.equal(layouts.put_tiles(tiles, sharding, axis_sizes(mesh)), full)
