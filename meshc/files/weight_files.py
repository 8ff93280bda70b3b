"""Weights in safetensors format: one file, or a folder of files with an index. Read lazily; nothing is unpickled.

    model.safetensors                                       or
    model.safetensors.index.json   {"weight_map": {"embed.weight": "model-00001-of-00002.safetensors", ...}}
    model-00001-of-00002.safetensors, ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from meshc.errors import ArtifactError
from meshc.files.tensor_file import TensorFile, TensorReader
from meshc.ir.bounds import parse_json, read_text

ONE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_ADVICE: Final = "download or copy it again"
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt")


class Weights(TensorReader):
    """Tensors of other readers under names of their own. `rows`: name -> (reader, name there)."""

    def __init__(self, rows: Mapping[str, tuple[Weights | TensorFile, str]] | None = None) -> None:
        super().__init__()
        self._rows = dict(rows or {})
        self.names = tuple(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        reader, there = self._rows[name]
        return reader.shape(there)

    def kind(self, name: str) -> str:
        """A tensor's dtype in safetensors' names: F32, BF16, I64, F8_E4M3, ..."""
        reader, there = self._rows[name]
        return reader.kind(there)

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        reader, there = self._rows[name]
        return reader.slice(there, ranges)

    def tensor(self, name: str) -> torch.Tensor:
        reader, there = self._rows[name]
        return reader.tensor(there)


class WeightFiles(Weights):
    """Tensors by name, from a folder or one file.

    Raises ArtifactError if there are no such files, if an index contradicts its files, or if a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        files: dict[str, TensorFile] = {}
        try:
            for file in _files(self.path):
                opened = self._stack.enter_context(TensorFile(file, advice=_ADVICE))
                for name in opened.names:
                    if name in files:
                        raise ArtifactError(f"{name} is in {files[name].path} and in {file}: which is meant cannot be known")
                    files[name] = opened
            _compare(self.path, files)
        except BaseException:
            self.close()
            raise
        self._rows = {name: (files[name], name) for name in sorted(files)}
        self.names = tuple(self._rows)


def _files(path: Path) -> list[Path]:
    """The weight files at a path."""
    if path.is_file() and path.suffix not in _PICKLED:
        return [path]
    if (path / INDEX).is_file():
        return [_inside(path, name) for name in sorted(set(_weight_map(path).values()))]
    if (path / ONE).is_file():
        return [path / ONE]
    alone = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(alone) == 1:
        return alone
    pickled = [path] if path.is_file() else [file for file in sorted(path.glob("*")) if file.suffix in _PICKLED] if path.is_dir() else []
    if pickled:
        raise ArtifactError(
            f"{pickled[0]} is a pickle, which can run anything that somebody has put into it, and cannot be read in parts\n"
            "  what to do: load it where you trust it, and write it as safetensors (transformers: model.save_pretrained(directory))"
        )
    there = "no files" if not path.exists() else f"{len(alone)} safetensors files and no index" if alone else "no weights"
    raise ArtifactError(f"there are {there} at {path}\n  what to do: give a safetensors file, or a folder that holds {ONE} or {INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    table = parse_json(read_text(folder / INDEX), str(folder / INDEX))
    rows = table.get("weight_map") if isinstance(table, dict) else None
    found = {name: file for name, file in rows.items() if isinstance(file, str)} if isinstance(rows, dict) else {}
    if not isinstance(rows, dict) or not found or len(found) != len(rows):
        raise ArtifactError(f'{folder / INDEX} has no "weight_map" of names and files\n  what to do: {_ADVICE}')
    return found


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that an index names; raises if that is not beside the index."""
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
        raise ArtifactError(f"{folder / INDEX} names {name!r:.80}, which is no file beside it")
    if not (folder / name).is_file():
        raise ArtifactError(f"{folder / INDEX} names {name}, which is not there\n  what to do: {_ADVICE}")
    return folder / name


def _compare(path: Path, files: dict[str, TensorFile]) -> None:
    if not (path / INDEX).is_file():
        return
    for name, file in _weight_map(path).items():
        if name not in files or files[name].path.name != file:
            raise ArtifactError(f"{path / INDEX} says that {name} is in {file}, where it is not\n  what to do: {_ADVICE}")
