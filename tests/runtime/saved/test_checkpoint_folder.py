"""A saved state: written by the ranks of one mesh, a part each, and read in any other layout."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshc.errors import ArtifactError, FileError, StateError
from meshc.files import tensor_file
from meshc.files.seal import seal_text
from meshc.ir import layouts
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Part, Sharding
from meshc.program.program import Port
from meshc.runtime.saved.checkpoint_folder import TABLE, SavedState, check_target, load_model, save_state

WEIGHTS = {
    "fused heads": Sharding(((Part("qkv", 3), Part("heads", 4, ("tp",)), Part("head", 2)), (Part("hidden", 6, ("dp",)),))),
    "uneven twice": Sharding(((Part("rows", 23, ("dp", "tp")),), (Part("columns", 7),))),
    "all padding": Sharding(((Part("rows", 3, ("dp", "tp")),), (Part("columns", 2),))),
    "whole": Sharding(((Part("rows", 4),),)),
    "scalar": Sharding(),
}
OTHERWISE = {
    "fused heads": Sharding(((Part("rows", 24, ("x",)),), (Part("hidden", 6),))),
    "uneven twice": Sharding(((Part("rows", 23),), (Part("columns", 7, ("x",)),))),
    "all padding": Sharding(((Part("rows", 3, ("x",)),), (Part("columns", 2),))),
    "whole": Sharding(((Part("rows", 4, ("x",)),),)),
    "scalar": Sharding(),
}


def full(name: str) -> Tensor:
    sharding = WEIGHTS[name]
    return torch.arange(1.0, 1 + torch.Size(sharding.shape).numel()).reshape(sharding.shape)


def save(path: Path, mesh: Mesh, step: int = 7, owners: Mapping[str, int] | None = None, errors: int = 1) -> None:
    """What all ranks do, each in a thread of its own, of which so many must fail alike if any does. Padding is NaN, never to be read."""
    barrier, failed, said = threading.Barrier(mesh.world_size), [], [""] * mesh.world_size
    places = {f"parameter:{name}": place for name, place in (owners or {}).items()}

    def meet(rank: int, text: str) -> list[str]:
        said[rank] = text
        barrier.wait(30)
        found = list(said)
        barrier.wait(30)
        return found

    def rank_saves(rank: int) -> None:
        tiles = []
        for name, sharding in WEIGHTS.items():
            sizes, at = axis_sizes(mesh), mesh.coordinates(rank)
            tile = layouts.take_tile(full(name), sharding, sizes, at)
            real = layouts.take_tile(torch.ones(sharding.shape), sharding, sizes, at)
            here = at.get("pp") == owners[name] if owners else True
            port = Port("parameter", name, sharding.shape, torch.float32, sharding)
            tiles.append((port, tile.where(real == 1, torch.nan) if here else None))
        try:
            save_state(path, mesh, rank, tiles, seed=-3, step=step, meet=partial(meet, rank), owners=places)
        except Exception as error:
            failed.append(error)
            if errors < mesh.world_size:  # where all fail, one may still be on its way out of the barrier
                barrier.abort()

    threads = [threading.Thread(target=rank_saves, args=(rank,)) for rank in mesh.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        assert len(failed) >= errors and len({str(error) for error in failed[:errors]}) == 1
        raise failed[0]


@pytest.mark.parametrize("mesh", ["dp=3,tp=2", "dp=1,tp=1", "dp=2,tp=4", "dp=2,pp=3,tp=2"])
def test_any_layout_reads_what_another_wrote(mesh: str, tmp_path: Path) -> None:
    owners = {name: place % 3 for place, name in enumerate(WEIGHTS)} if "pp" in mesh else None
    save(tmp_path / "s", Mesh(mesh), owners=owners)
    with SavedState(tmp_path / "s") as state:
        assert (state.seed, state.step) == (-3, 7)
        for name, sharding in OTHERWISE.items():
            for place in range(4):
                tile = state.tile(f"parameter:{name}", sharding, {"x": 4}, {"x": place})
                assert torch.equal(tile, layouts.take_tile(full(name), sharding, {"x": 4}, {"x": place}))
    whole = load_model(tmp_path / "s")
    assert whole.keys() == WEIGHTS.keys() and all(torch.equal(value, full(name)) for name, value in whole.items())


def test_a_rank_writes_its_own_tiles_and_no_copies(tmp_path: Path) -> None:
    save(tmp_path / "s", Mesh("dp=3,tp=2"))
    shards = [f"rank_0000{rank}.safetensors" for rank in range(6)]
    assert sorted(file.name for file in (tmp_path / "s").iterdir()) == [*shards, "state.json"]
    first, *others = [load_file(tmp_path / "s" / name) for name in shards]
    split = {"parameter:fused heads", "parameter:uneven twice", "parameter:all padding"}
    assert first.keys() == {*split, "parameter:whole", "parameter:scalar"} and all(held.keys() == split for held in others)
    assert [tuple(held["parameter:fused heads"].shape) for held in (first, *others)] == [(12, 2)] * 6  # 24 rows over tp, 6 columns over dp


def test_a_state_replaces_a_state_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path / "s", Mesh("dp=2,tp=2"))
    save(tmp_path / "s", Mesh("dp=1,tp=2"), step=8)
    assert SavedState(tmp_path / "s").step == 8 and [file.name for file in tmp_path.iterdir()] == ["s"]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("keep")
    with pytest.raises(StateError, match="notes exists and is no saved state"):
        check_target(tmp_path / "notes")


def test_damage_is_found_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no saved state at .*gone"):
        SavedState(tmp_path / "gone")
    save(tmp_path / "s", Mesh("dp=1,tp=2"))
    shard = tmp_path / "s/rank_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="rank_00001.safetensors is missing or not of 1[0-9]{3} bytes"):
        SavedState(tmp_path / "s")
    table = json.loads((tmp_path / "s/state.json").read_text())
    (tmp_path / "s/state.json").write_text(seal_text({**table, "mesh": "dp"}))
    with pytest.raises(ArtifactError, match="does not describe a state"):
        SavedState(tmp_path / "s")
    (tmp_path / "s/state.json").write_text(seal_text({**table, "owners": {"parameter:whole": 1}}))
    with pytest.raises(ArtifactError, match="does not describe a state: .* 1 is no place on a pipeline axis of the mesh dp=1,tp=2"):
        SavedState(tmp_path / "s")
    (tmp_path / "s/state.json").write_text(seal_text({**table, "version": 3}))
    with pytest.raises(ArtifactError, match="is no 'meshc state' of version 1 or 2"):
        SavedState(tmp_path / "s")


def test_one_bit_that_has_changed_in_any_file_is_never_loaded(tmp_path: Path) -> None:
    """The attack that this is for: a bit of an exponent, and the weight is -5.6e35."""
    save(tmp_path / "s", Mesh("dp=1,tp=2"))
    chosen = random.Random(1)
    for file in sorted((tmp_path / "s").iterdir()):
        data = file.read_bytes()
        for at in chosen.sample(range(len(data)), 40):
            changed = bytearray(data)
            changed[at] ^= 1 << chosen.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(ArtifactError, match=rf"(?s){file.name}.*take another copy of the state|{TABLE} is no 'meshc state'"):
                load_model(tmp_path / "s")
        file.write_bytes(data)
    assert torch.equal(load_model(tmp_path / "s")["whole"], full("whole"))


def test_a_state_of_the_first_version_is_read_with_a_warning(tmp_path: Path) -> None:
    save(tmp_path / "s", Mesh("dp=1,tp=2"))
    table = json.loads((tmp_path / "s/state.json").read_text())
    for name in table["files"]:
        save_file(load_file(tmp_path / "s" / name), tmp_path / "s" / name)
        table["files"][name] = (tmp_path / "s" / name).stat().st_size
    (tmp_path / "s/state.json").write_text(json.dumps({**table, "version": 1}))
    with pytest.warns(UserWarning, match="s was saved without hashes: damage to its tensors is not noticed; save the state again"):
        whole = load_model(tmp_path / "s")
    assert all(torch.equal(value, full(name)) for name, value in whole.items())


def test_a_rank_whose_disk_is_full_stops_all_with_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "s", Mesh("dp=1,tp=2"))
    write = tensor_file.write

    def full_on_rank_1(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        if path.name == "rank_00001.safetensors":
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, tensors)

    monkeypatch.setattr(tensor_file, "write", full_on_rank_1)
    with pytest.raises(FileError, match="(?s)s cannot be written: No space left on device, .* MB are free there.*on rank 1$"):
        save(tmp_path / "s", Mesh("dp=1,tp=2"), step=8, errors=2)
    assert os.listdir(tmp_path) == ["s"] and SavedState(tmp_path / "s").step == 7
