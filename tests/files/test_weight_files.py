"""Weights as others keep them: one file or several, and what is not read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshc.errors import ArtifactError
from meshc.files.weight_files import INDEX, WeightFiles

PARTS = {"a.safetensors": {"up": torch.arange(12.0).view(3, 4)}, "b.safetensors": {"down": torch.ones(2, dtype=torch.bfloat16)}}


def written(folder: Path, **changed: str) -> Path:
    for file, tensors in PARTS.items():
        save_file(tensors, folder / file)
    rows = {name: file for file, tensors in PARTS.items() for name in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": rows | changed}))
    return folder


def test_several_files_are_read_by_their_index_and_one_without(tmp_path: Path) -> None:
    with WeightFiles(written(tmp_path)) as files:
        assert files.names == ("down", "up") and files.shape("up") == (3, 4) and files.kind("down") == "BF16"
        assert torch.equal(files.slice("up", [(1, 3), (0, 2)]), PARTS["a.safetensors"]["up"][1:, :2])
    (tmp_path / INDEX).unlink()
    (tmp_path / "b.safetensors").unlink()
    for path in (tmp_path, tmp_path / "a.safetensors"):
        with WeightFiles(path) as files:
            assert torch.equal(files.tensor("up"), PARTS["a.safetensors"]["up"])


@pytest.mark.parametrize(
    "changed, told",
    [
        ({"up": "../a.safetensors"}, "which is no file beside it"),
        ({"up": "c.safetensors"}, "names c.safetensors, which is not there"),
        ({"up": "b.safetensors"}, "says that up is in b.safetensors, where it is not"),
        ({"more": "a.safetensors"}, "says that more is in a.safetensors, where it is not"),
    ],
)
def test_an_index_that_says_something_else_is_refused(tmp_path: Path, changed: dict[str, str], told: str) -> None:
    with pytest.raises(ArtifactError, match=told):
        WeightFiles(written(tmp_path, **changed))


def test_a_name_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    save_file({"up": torch.zeros(3, 4), "down": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(ArtifactError, match="up is in .*a.safetensors and in .*b.safetensors"):
        WeightFiles(tmp_path)


def test_pickles_and_empty_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"there are no weights at .*\n  what to do: give a safetensors file"):
        WeightFiles(tmp_path)
    torch.save({"up": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(ArtifactError, match=r"is a pickle, .*\n  what to do: load it where you trust it"):
            WeightFiles(path)
