"""Files of tensors: one bit that has changed anywhere is found, named, and never loaded; no more is hashed than is read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshc.errors import ArtifactError
from meshc.files import tensor_file
from meshc.files.tensor_file import TensorFile, write

TENSORS = {
    "down.weight": torch.arange(600.0).view(20, 30),
    "mask": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 4, dtype=torch.int64),
    "scale": torch.tensor(2.0, dtype=torch.bfloat16),
}


@pytest.fixture
def blocks_of_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)


def test_tensors_come_back_and_the_file_is_the_same_each_time(tmp_path: Path, blocks_of_64: None) -> None:
    told = write(tmp_path / "a", TENSORS)
    assert told == write(tmp_path / "b", TENSORS) and (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with TensorFile(tmp_path / "a", told) as file:
        assert set(file.names) == TENSORS.keys()
        assert all(torch.equal(file.tensor(name), value) and file.tensor(name).dtype == value.dtype for name, value in TENSORS.items())
        assert torch.equal(file.slice("down.weight", [(3, 9), (28, 40)]), TENSORS["down.weight"][3:9, 28:])


def test_any_bit_that_has_changed_is_found(tmp_path: Path, blocks_of_64: None) -> None:
    told, chosen = write(tmp_path / "a", TENSORS), random.Random(0)
    data = (tmp_path / "a").read_bytes()
    begins = 8 + int.from_bytes(data[:8], "little")
    for at in [*range(8), *chosen.sample(range(8, begins), 60), *range(begins, len(data), 7)]:
        changed = bytearray(data)
        changed[at] ^= 1 << chosen.randrange(8)
        (tmp_path / "a").write_bytes(changed)
        told_so = r"(?s)a (is not what was saved|cannot be read): .*what to do: save or copy it again"
        with pytest.raises(ArtifactError, match=told_so) as caught:
            with TensorFile(tmp_path / "a", told) as file:
                for name in file.names:
                    file.tensor(name)
        if at >= begins:
            assert any(f"it holds {name} otherwise than it was saved: its bytes " in str(caught.value) for name in TENSORS)


def test_a_slice_hashes_the_blocks_that_it_lies_in_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 128)  # a row of 64 numbers is two of them
    told = write(tmp_path / "a", {"w": torch.arange(640.0).view(10, 64)})
    read: list[int] = []
    original = TensorFile._read_range
    monkeypatch.setattr(
        TensorFile, "_read_range", lambda self, name, at, length: read.append(at // 128) or original(self, name, at, length)
    )
    with TensorFile(tmp_path / "a", told) as file:
        assert file.slice("w", [(2, 4), (0, 32)]).tolist() == [list(range(128, 160)), list(range(192, 224))]
        assert read == [4, 6]  # the left halves of rows 2 and 3
        file.slice("w", [(3, 5), (16, 48)])
        assert read == [4, 6, 7, 8, 9]
        file.slice("w", [(4, 4), (0, 64)])
        assert len(read) == 5
        file.tensor("w")
        assert sorted(read) == list(range(20))


def test_a_file_of_another_save_cannot_stand_in(tmp_path: Path) -> None:
    told = write(tmp_path / "a", {"w": torch.ones(4), "v": torch.zeros(4)})
    write(tmp_path / "a", {"w": torch.zeros(4), "v": torch.ones(4)})  # both are whole files of the same size
    with pytest.raises(ArtifactError, match="a has a header with the hash|a is not what was saved: it has a header with the hash"):
        TensorFile(tmp_path / "a", told)


def test_a_file_without_hashes_is_read_as_it_is_unless_it_should_have_some(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "x")
    with TensorFile(tmp_path / "x") as file:
        assert torch.equal(file.tensor("x"), torch.ones(3))
    seal = {"bytes": (tmp_path / "x").stat().st_size, "header": "0" * 64}
    with pytest.raises(ArtifactError, match="is not what was saved"):
        TensorFile(tmp_path / "x", seal)
    with pytest.raises(ArtifactError, match="none cannot be read: "):
        TensorFile(tmp_path / "none")
