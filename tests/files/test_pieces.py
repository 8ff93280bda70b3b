"""Reading a rank's part of saved weights: what is read is the rank's tile, and no more than that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from meshc.files.pieces import tile_runs
from meshc.files.tensor_file import TensorFile
from meshc.ir import layouts
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding

SHARDINGS = {
    "fused heads": Sharding(((Part("qkv", 3), Part("heads", 4, ("tp",)), Part("head", 2)), (Part("hidden", 6, ("dp",)),))),
    "uneven twice": Sharding(((Part("rows", 23, ("dp", "tp")),), (Part("columns", 7),))),
    "all padding": Sharding(((Part("rows", 3, ("dp", "tp")),), (Part("columns", 2),))),
    "inner factor": Sharding(((Part("outer", 5), Part("inner", 3, ("tp",))),)),
    "scalar": Sharding(),
    "whole": Sharding(((Part("rows", 4),),)),
}


class Counting(TensorFile):
    """Counts the elements that it hands out."""

    read = 0

    def slice(self, name: str, ranges: Any) -> torch.Tensor:
        found = super().slice(name, ranges)
        self.read += found.numel()
        return found


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_tile_read_in_pieces_is_the_tile(name: str, tmp_path: Path) -> None:
    sharding, mesh = SHARDINGS[name], Mesh("dp=3,tp=2")
    full = torch.arange(1.0, 1 + torch.Size(sharding.shape).numel()).reshape(sharding.shape)
    save_file({"w": full}, tmp_path / "w.safetensors")
    sizes = axis_sizes(mesh)
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        with Counting(tmp_path / "w.safetensors") as file:
            tile = file.tile("w", sharding, sizes, at)
            wanted = layouts.take_tile(full, sharding, sizes, at)
            assert torch.equal(tile, wanted)
            if sharding.split_axes():
                assert file.read == int(wanted.count_nonzero())


def test_a_split_of_fused_heads_is_three_pieces() -> None:
    runs, columns = tile_runs(SHARDINGS["fused heads"], {"dp": 3, "tp": 2}, {"dp": 1, "tp": 1})
    assert runs == [(4, 0, 4), (12, 4, 4), (20, 8, 4)]
    assert columns == [(2, 0, 2)]
