"""Safetensors files with hashes by block, which are checked when a slice is read.

    header   {"__metadata__": {"meshc": {"block_bytes": 1048576, "sha256": {"up.weight": ["9f86d081884c7d65...", ...]}}},
              "up.weight": {"dtype": "F32", "shape": [512, 1024], "data_offsets": [0, 2097152]}}
    data     a rank's slice of `up.weight` touches some of its blocks: these are hashed, each once, and compared

A hash covers a block's bytes, the tensor's name and shape, and the block's number, so that no tensor can replace another. Hashes are
computed from memory, before anything is written. A `Seal`, stored in a table beside the file, has the file's size and a hash of its header,
which holds the other hashes. A file without hashes, such as a user's inputs, is read unchecked.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypedDict, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from meshc.errors import ArtifactError
from meshc.files.folders import to_disk
from meshc.files.pieces import tile_runs
from meshc.ir.bounds import parse_json
from meshc.ir.sharding import Sharding, local_shape

BLOCK_BYTES: Final = 1 << 20
_KEY: Final = "meshc"
_LONGEST_HEADER: Final = 100_000_000
"""Largest header in bytes; safetensors' own limit."""
_AGAIN: Final = "save or copy it again"


class Seal(TypedDict):
    """A file's size and the hash of its header, stored in a table beside the file."""

    bytes: int
    header: str


class _HeaderEntry(TypedDict):
    """A tensor's entry in the header."""

    dtype: str
    shape: list[int]
    data_offsets: list[int]


class _Hashes(TypedDict):
    block_bytes: int
    sha256: dict[str, list[str]]


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Seal:
    """Write tensors with their hashes, and return the file's seal. The file is on the disk when this returns."""
    plain = _plain(tensors)
    hashes = {name: list(_hashes(name, tensor)) for name, tensor in plain.items()}
    save_file(plain, path, metadata={_KEY: json.dumps({"block_bytes": BLOCK_BYTES, "sha256": hashes}, sort_keys=True)})
    to_disk(path)
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "header": _sha256(_header(file.fileno()))}


class TensorReader:
    """Tensors by name that are read slice by slice. Use as a context manager, or `close` it."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        raise NotImplementedError

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The slice of a tensor with a range (start, stop) for each dim."""
        raise NotImplementedError

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        return self.slice(name, [(0, size) for size in self.shape(name)])

    def tile(self, name: str, sharding: Sharding | None, sizes: Mapping[str, int], coordinates: Mapping[str, int]) -> torch.Tensor:
        """A rank's padded tile of a tensor, zero in the padding; no more is read than the tile holds. None: the whole tensor."""
        if sharding is None or not sharding.split_axes():
            return self.tensor(name)
        assert self.shape(name) == sharding.shape, f"{name}: {self.shape(name)} is not split as {sharding}"
        shape = local_shape(sharding, sizes)
        tile: torch.Tensor | None = None
        for runs in itertools.product(*tile_runs(sharding, sizes, coordinates)):
            piece = self.slice(name, [(start, start + length) for start, _, length in runs])
            if tuple(piece.shape) == tuple(shape):
                return piece
            if tile is None:
                tile = piece.new_zeros(shape)
            tile[tuple(slice(at, at + length) for _, at, length in runs)] = piece
        if tile is None:  # all padding
            tile = self.slice(name, [(0, 0)] * len(sharding.dims)).new_zeros(shape)
        return tile

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorFile(TensorReader):
    """Tensors on disk, read a slice at a time.

    seal    the result of `write`; without it the file need not have hashes
    advice  text of what to do if the file is damaged

    Raises ArtifactError for a damaged file: on opening for its size and header, later for the tensors that are read.
    """

    def __init__(self, path: Path, seal: Seal | None = None, advice: str = _AGAIN) -> None:
        super().__init__()
        self.path, self._advice = path, advice
        with self._readable():
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._descriptor)
        try:
            self._open(seal)
        except BaseException:
            self.close()
            raise

    def _open(self, seal: Seal | None) -> None:
        with self._readable():
            header = _header(self._descriptor)
            size = os.fstat(self._descriptor).st_size
        if seal is not None and size != seal["bytes"]:
            raise self._damage_error(f"has {size} bytes, and {seal['bytes']} were written")
        if seal is not None and _sha256(header) != seal["header"]:
            raise self._damage_error(f"has a header with the hash {_sha256(header)[:12]}, and one with {seal['header'][:12]} was written")
        with self._readable():
            self._file = self._stack.enter_context(safe_open(self.path, framework="pt", device="cpu"))
            rows = cast(dict[str, _HeaderEntry], parse_json(header[8:].decode(), f"the header of {self.path}"))
        self._data = len(header)
        told = cast(dict[str, str], rows.pop("__metadata__", {})).get(_KEY)
        if told is None and seal is not None:
            raise self._damage_error("carries no hashes")
        self._rows = rows
        self.names = tuple(self._file.keys())
        self._hashes = None if told is None else self._read_hash_table(told)
        self._checked: dict[str, set[int]] = {name: set() for name in self.names}

    def _read_hash_table(self, text: str) -> tuple[int, dict[str, list[str]]]:
        """(bytes of a block, hashes of each tensor's blocks), checked to have one hash per block."""
        try:
            told = cast(_Hashes, parse_json(text, "its metadata"))
            block, hashes = int(told["block_bytes"]), dict(told["sha256"])
            wanted = {name: -(-self._bytes(name) // block) for name in self.names}
            if block < 1 or {name: len(rows) for name, rows in hashes.items()} != wanted:
                raise ValueError("they are not those of its tensors")
        except (ValueError, KeyError, TypeError, ArtifactError, ArithmeticError) as error:
            raise self._damage_error(f"has hashes that cannot be read ({error})") from None
        return block, hashes

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(self._check_name(name)).get_shape())

    def kind(self, name: str) -> str:
        """A tensor's dtype in safetensors' names: F32, BF16, I64, ..."""
        return self._rows[self._check_name(name)]["dtype"]

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The slice of a tensor with a range (start, stop) for each dim; only the blocks that contain it are read.

        Ranges are clipped to the tensor: a tile that reaches into padding is returned shorter, or empty.
        """
        shape = self.shape(name)
        if len(ranges) != len(shape) or any(start < 0 or stop < start for start, stop in ranges):
            raise ArtifactError(f"{self.path}: {name} has shape {list(shape)}, which {list(ranges)} is no slice of")
        inside = [(min(start, size), min(stop, size)) for (start, stop), size in zip(ranges, shape, strict=True)]
        self._check(name, inside)
        with self._readable():
            found: torch.Tensor = self._file.get_slice(name)[tuple(slice(*one) for one in inside)]
        return found

    def tensor(self, name: str) -> torch.Tensor:
        self._check(name, [(0, size) for size in self.shape(name)])
        with self._readable():
            found: torch.Tensor = self._file.get_tensor(name)
        return found

    def _check_name(self, name: str) -> str:
        if name not in self.names:
            raise ArtifactError(f"{self.path} has no tensor {name!r}; it has {len(self.names)}: {', '.join(self.names[:8])}, ...")
        return name

    def _bytes(self, name: str) -> int:
        first, last = self._rows[name]["data_offsets"]
        return int(last) - int(first)

    def _check(self, name: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Checks the hashes of the blocks that contain a slice, each block once."""
        if self._hashes is None:
            return
        block, hashes = self._hashes
        shape, done = self.shape(name), self._checked[name]
        length = self._bytes(name)
        elements = max(1, torch.Size(shape).numel())
        for start, stop in _runs(shape, ranges, length // elements, block):
            for index in range(start // block, -(-stop // block)):
                if index in done:
                    continue
                at = index * block
                found = _hash(name, shape, index, self._read_range(name, at, min(block, length - at)))
                if found != hashes[name][index]:
                    where = f"its bytes {at} to {min(at + block, length)} have the hash {found[:12]}, saved were {hashes[name][index][:12]}"
                    raise self._damage_error(f"holds {name} otherwise than it was saved: {where}")
                done.add(index)

    def _read_range(self, name: str, at: int, length: int) -> bytes:
        with self._readable():
            found = os.pread(self._descriptor, length, self._data + int(self._rows[name]["data_offsets"][0]) + at)
        if len(found) != length:
            raise self._damage_error(f"ends within {name}")
        return found

    def _damage_error(self, how: str) -> ArtifactError:
        return ArtifactError(
            f"{self.path} is not what was saved: it {how}\n"
            f"  why: the file was damaged on its way or on the disk, truncated, or replaced; nothing of it was loaded\n"
            f"  what to do: {self._advice}"
        )

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise ArtifactError(f"{self.path} cannot be read: {error}\n  what to do: {self._advice}") from None


def _runs(shape: Sequence[int], ranges: Sequence[tuple[int, int]], element_bytes: int, block: int) -> Iterator[tuple[int, int]]:
    """Byte ranges (start, stop) of a slice of a contiguous tensor; gaps too small for a block are included."""
    if any(start == stop for start, stop in ranges):
        return
    if not shape:
        yield 0, element_bytes
        return
    inner, *strides = (element_bytes * torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape)))
    (first, last), *others = ranges
    starts = sum(start * stride for (start, _), stride in zip(others, strides, strict=True))
    ends = sum((stop - 1) * stride for (_, stop), stride in zip(others, strides, strict=True))
    if inner - (ends + element_bytes - starts) < block:
        yield first * inner + starts, (last - 1) * inner + ends + element_bytes
        return
    for index in range(first, last):
        for start, stop in _runs(shape[1:], ranges[1:], element_bytes, block):
            yield index * inner + start, index * inner + stop


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as safetensors requires them: on the host, contiguous, without shared storage."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != value.nbytes:
            value = value.clone()
        seen.add(storage.data_ptr())
        plain[name] = value
    return plain


def _hashes(name: str, tensor: torch.Tensor) -> Iterator[str]:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")
    for index, start in enumerate(range(0, len(data), BLOCK_BYTES)):
        yield _hash(name, tensor.shape, index, data[start : start + BLOCK_BYTES])


def _hash(name: str, shape: Sequence[int], index: int, data: bytes | memoryview) -> str:
    digest = hashlib.sha256(json.dumps([name, list(shape), index]).encode())
    digest.update(data)
    return digest.hexdigest()[:32]


def _header(descriptor: int) -> bytes:
    """A file's header: all bytes before the tensors."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > min(_LONGEST_HEADER, os.fstat(descriptor).st_size):
        raise ValueError("it does not begin with a header")
    return os.pread(descriptor, 8 + length, 0)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
