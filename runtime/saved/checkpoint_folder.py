"""Sharded checkpoints, written and read: parameters, buffers and optimizer state, each rank's tiles in a file of its own.

    state.json                format, mesh, seed and step; the type of each tensor, as in a program's text; size and header hash of each
                              file; and a hash of all this
    rank_00003.safetensors    the tiles of rank 3, without those that an earlier rank holds as well, and their hashes

No tensor is whole on any rank, neither when it is written nor when it is read, and another mesh or plan may read it: each rank reads the
ranges of its own tiles, and checks their hashes. Nothing is unpickled (docs/decisions/saved-state.md). All ranks see one file system.
Another file format would be a module beside this one, chosen by its caller, `run_saved.py`.
(State dicts of a program in memory, for torch's own checkpoints: `runtime/state/state_dicts.py`.)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from meshc.errors import ArtifactError, FileError, MeshcError, StateError
from meshc.files import seal, tensor_file
from meshc.files.folders import kept_aside, may_replace, move_into_place, replacing, to_disk, writing
from meshc.files.pieces import Run, shared_runs, tile_runs
from meshc.files.tensor_file import Seal, TensorFile, TensorReader
from meshc.ir import Record, layouts
from meshc.ir.bounds import integer, parse_json, read_text
from meshc.ir.keys import is_a, name_of
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Sharding, local_shape
from meshc.program.program import Port
from meshc.text.parse import parse_one_type
from meshc.text.printer import port_type

FORMAT: Final = "meshc state"
VERSION: Final = 2
READ: Final = (1, 2)
"""Versions that can be read. The first has no hashes."""
TABLE: Final = "state.json"
Meet = Callable[[str], Sequence[str]]
ADVICE: Final = "take another copy of the state, or go on from an older one"


def check_target(path: str | os.PathLike[str]) -> None:
    """Raises StateError if `path` is something else than a saved state: call it before there is anything to lose."""
    if not may_replace(Path(os.path.realpath(path)), TABLE):
        raise StateError(f"{path} exists and is no saved state: it is not replaced; remove it or choose another path")


def save_state(
    path: str | os.PathLike[str],
    mesh: Mesh,
    rank: int,
    tiles: Iterable[tuple[Port, Tensor | None]],
    seed: int,
    step: int,
    meet: Meet,
    owners: Mapping[str, int] | None = None,
) -> None:
    """Write every rank's tiles to the folder `path`; a state that is there is replaced. All ranks call it.

    tiles   the ports that keep something and this rank's padded tiles of them, None if it has no part of one
    meet    all-gathers a text: returns the texts of all ranks in the order of ranks (0, 1, ...)
    owners  place on the mesh's pipeline axis, by key, of tensors stored on one stage's ranks

    Raises FileError on all ranks, naming those that could not write; then `path` is as it was, and nothing else is left.
    """
    check_target(path)
    target, kept, at, root = Path(os.path.realpath(path)), list(tiles), owners or {}, mesh.ranks[0]
    with contextlib.ExitStack() as stack:
        made = _together(target, meet, lambda: str(stack.enter_context(replacing(target))) if rank == root else "")[root]
        mine = {
            port.key: tile
            for port, tile in kept
            if tile is not None and _holder(port.sharding or layouts.whole_sharding(port.shape), mesh, rank, at.get(port.key)) == rank
        }
        rows = _together(target, meet, lambda: json.dumps(_write_tiles(Path(made), rank, mine, root)))
        table = {
            "format": FORMAT, "version": VERSION, "mesh": str(mesh), "seed": seed, "step": step,
            "tensors": {port.key: port_type(port) for port, _ in kept},
            **({"owners": {port.key: at[port.key] for port, _ in kept if port.key in at}} if at else {}),
            "files": {_file(one): json.loads(rows[one]) for one in mesh.ranks},
        }  # fmt: skip
        _together(target, meet, lambda: _write_table(Path(made), target, table) if rank == root else "")


def _together(target: Path, meet: Meet, work: Callable[[], str]) -> list[str]:
    """The result of `work` on each rank. If it fails on any, all ranks raise one error, so that none waits for another."""
    mine: dict[str, str] = {}
    try:
        with writing(target):
            mine["value"] = work()
    except FileError as error:
        mine["error"] = str(error)
    found = [json.loads(text) for text in meet(json.dumps(mine))]
    failed = [place for place, one in enumerate(found) if "error" in one]
    if failed:
        who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
        raised = FileError(f"{found[failed[0]]['error']}\n  on {who}")
        raised.everywhere = True
        raise raised
    return [one["value"] for one in found]


def _write_tiles(made: Path, rank: int, tiles: Mapping[str, Tensor], root: int) -> Seal:
    if not made.is_dir():
        raise FileError(f"rank {rank} does not see {made}, which rank {root} made\n  what to do: choose a folder that all ranks see")
    return tensor_file.write(made / _file(rank), tiles)


def _write_table(made: Path, target: Path, table: Mapping[str, object]) -> str:
    (made / TABLE).write_text(seal.seal_text(table), encoding="utf-8")
    to_disk(made / TABLE)
    move_into_place(made, target)
    return ""


class SavedState(TensorReader):
    """A state on disk, to be read a tile at a time by key, in any layout.

    Raises ArtifactError for a folder that is missing, damaged or of another version, and later for a tile that is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._open: dict[int, TensorFile] = {}
        self._sources: dict[str, list[tuple[int, list[list[Run]]]]] = {}
        table = _table(self.path)
        try:
            self._mesh = Mesh(table["mesh"])
            self.seed = integer(table["seed"], "the seed", -(1 << 63), (1 << 64) - 1)
            self.step = integer(table["step"], "the step")
            self.tensors: dict[str, Record] = {key: parse_one_type(text) for key, text in table["tensors"].items()}
            self.names = tuple(self.tensors)
            self._owners = {key: _place(place, self._mesh) for key, place in table.get("owners", {}).items()}
            files = {rank: table["files"][_file(rank)] for rank in self._mesh.ranks}
            hashed = table["version"] > READ[0]
            sizes = {_file(rank): int(told["bytes"] if hashed else told) for rank, told in files.items()}
            self._seals = {rank: Seal(bytes=int(told["bytes"]), header=str(told["header"])) for rank, told in files.items() if hashed}
        except (MeshcError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ArtifactError(f"{self.path / TABLE} does not describe a state: {type(error).__name__} {error}") from error
        for name, size in sizes.items():
            file = self.path / name
            if not file.is_file() or file.stat().st_size != size:
                raise ArtifactError(f"{self.path} is damaged: {name} is missing or not of {size} bytes, as written; {ADVICE}")

    def shape(self, name: str) -> tuple[int, ...]:
        self._tiles_of(name)
        return self.tensors[name].shape

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> Tensor:
        sources = self._tiles_of(name)
        found = torch.zeros([stop - start for start, stop in ranges], dtype=self.tensors[name].dtype)
        for rank, source in sources:
            shared = [shared_runs(runs, [(start, 0, stop - start)]) for runs, (start, stop) in zip(source, ranges, strict=True)]
            for piece in itertools.product(*shared):
                values = self._shard(rank).slice(name, [(at, at + length) for at, _, length in piece])
                found[tuple(slice(to, to + length) for _, to, length in piece)] = values
        return found

    def _tiles_of(self, key: str) -> list[tuple[int, list[list[Run]]]]:
        """The ranks that hold a part of a tensor, each with the ranges of its tile. Raises ArtifactError, before memory is allocated, if a
        rank's file has no tile of the shape that the table says."""
        if key not in self._sources:
            record, owner, sizes = self.tensors[key], self._owners.get(key), axis_sizes(self._mesh)
            sharding = record.sharding or layouts.whole_sharding(record.shape)
            wanted = local_shape(sharding, sizes)
            ranks = [rank for rank in self._mesh.ranks if _holder(sharding, self._mesh, rank, owner) == rank]
            for rank in ranks:
                if (found := self._shard(rank).shape(key)) != wanted:
                    what = f"{key} is {list(found)} in {_file(rank)}, and the table says that a rank's tile of it is {list(wanted)}"
                    raise ArtifactError(f"{self.path / TABLE} does not describe what is there: {what}; {ADVICE}")
            self._sources[key] = [(rank, tile_runs(sharding, sizes, self._mesh.coordinates(rank))) for rank in ranks]
        return self._sources[key]

    def _shard(self, rank: int) -> TensorFile:
        if rank not in self._open:
            file = TensorFile(self.path / _file(rank), self._seals.get(rank), ADVICE)
            self._open[rank] = self._stack.enter_context(file)
        return self._open[rank]


def load_model(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Whole parameters and buffers by name, for `model.load_state_dict(load_model(path), strict=False)`.

    Not strict, since there is one name of a tied parameter, and there are buffers that state dicts leave out.
    """
    with SavedState(path) as state:
        return {name_of(key): state.tensor(key) for key in state.names if is_a(key, "parameter", "buffer")}


def _table(folder: Path) -> dict[str, Any]:
    if not (folder / TABLE).is_file():
        hint = kept_aside(folder) if not folder.is_dir() else ""
        raise ArtifactError(f"there is no saved state at {folder}{hint}: `meshc run PATH --save-state DIR` makes such a folder")
    try:
        text = read_text(folder / TABLE)
        table = parse_json(text, str(folder / TABLE))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {ADVICE}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT or table.get("version") not in READ:
        known = " or ".join(map(str, READ))
        raise ArtifactError(f"{folder / TABLE} is no {FORMAT!r} of version {known}, which is what this meshc reads")
    if table["version"] == READ[0]:
        warnings.warn(f"{folder} was saved without hashes: damage to its tensors is not noticed; save the state again", stacklevel=3)
    elif not seal.has_valid_seal(text):
        raise ArtifactError(f"{folder / TABLE} is not what was saved, it was damaged or edited; {ADVICE}")
    return table


def _file(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def _place(place: object, mesh: Mesh) -> int:
    axis = mesh.pipeline_axis
    if axis is None or type(place) is not int or not 0 <= place < axis.size:
        raise ValueError(f"{place!r:.60} is no place on a pipeline axis of the mesh {mesh}")
    return place


def _holder(sharding: Sharding, mesh: Mesh, rank: int, owner: int | None) -> int:
    """The first of the ranks that have the same tile as this one, or would have if they were of the stage at `owner`."""
    at, split = mesh.coordinates(rank), sharding.split_axes()
    holder = {axis: index if axis in split else 0 for axis, index in at.items()}
    if owner is not None and mesh.pipeline_axis is not None:
        holder[mesh.pipeline_axis.name] = owner
    return mesh.rank(holder)
