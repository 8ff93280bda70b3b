"""A saved program: a folder of texts, JSON and safetensors. Reading one executes nothing and unpickles nothing.

    manifest.json            format and version, mesh, torch version, size and SHA-256 of each file
    program.json             ports, schedule or pipeline, plan, mesh, mode, microbatches, notes, the stages' side tables
    stages/NAME.py           the stages, as `meshc.text` prints them
    constants.safetensors    constant tensors
    weights.safetensors      parameters and buffers, if they were saved along

A folder is complete or not there: `save` writes beside the path and renames, and an older program at the path survives until then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from meshc import ir
from meshc.allowed import name_of
from meshc.errors import ArtifactError, MeshcError, ScheduleError
from meshc.folders import beside, may_replace, put, to_disk
from meshc.instance import relation
from meshc.mesh import Mesh
from meshc.parse import parse_one_type, parse_sizes, parse_stage
from meshc.pipelining import written
from meshc.pipelining.complete import refuse_incomplete
from meshc.plan import Plan
from meshc.program import KINDS, Instruction, Port, Program
from meshc.sizes import parse as parse_size
from meshc.text import port_type, print_sizes, print_stage, side_table

FORMAT: Final = "meshc program"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
PROGRAM: Final = "program.json"
CONSTANTS: Final = "constants.safetensors"
WEIGHTS: Final = "weights.safetensors"
HASHED_BYTES: Final = 1 << 30
"""Weights up to this size are hashed when they are opened; of larger ones the size is checked, unless all of it is asked for."""


def save(program: Program, path: str | os.PathLike[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a program, and whole weights by name if given, to the folder `path`; a program that is there is replaced.

    Entries of `program.info` that JSON cannot hold are left out. Raises ArtifactError if the program has no text (an operator off the
    allow-list, for instance) or something else stands at `path`; then nothing has changed there.
    """
    target = Path(os.path.realpath(path))
    if not may_replace(target, MANIFEST):
        raise ArtifactError(f"{path} exists and is no saved program: it is not replaced; remove it or choose another path")
    for stage in program.stages.values():
        for node in ir.calls(stage.graph):
            name_of(node.target)
    texts = {f"stages/{name}.py": print_stage(stage, program) for name, stage in program.stages.items()}
    texts[PROGRAM] = json.dumps(_described(program), indent=1) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    made = beside(target, f"new-{secrets.token_hex(4)}")
    try:
        (made / "stages").mkdir(parents=True)
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8", newline="\n")
        save_file(_plain(program.constants), made / CONSTANTS)
        if weights is not None:
            save_file(_plain(weights), made / WEIGHTS)
        names = [*texts, CONSTANTS, *([WEIGHTS] if weights is not None else [])]
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "torch": torch.__version__,
            "mesh": str(program.mesh),
            "files": {name: {"bytes": (made / name).stat().st_size, "sha256": _sha256(made / name)} for name in sorted(names)},
        }
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        for name in (*names, MANIFEST):
            to_disk(made / name)
        put(made, target)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def load(path: str | os.PathLike[str], *, allow_edited: bool = False) -> Program:
    """The program in the folder `path`. Weights stay on disk (`open_weights`); only their size is checked.

    With `allow_edited`, `program.json` and the stages' texts may differ from their hashes; they are parsed and checked in any case.
    Raises ArtifactError for a folder that is missing, damaged, edited, of another version, or holds what no program may.
    """
    folder = Path(path)
    files = _manifest(folder)
    for name, entry in files.items():
        _check(folder, name, entry, editable=_is_text(name), allow_edited=allow_edited, hashed=name != WEIGHTS)
    for name in (PROGRAM, CONSTANTS):
        _listed(folder, name, files)
    told = _json(folder / PROGRAM)
    try:
        return _program(folder, told, files)
    except ArtifactError:
        raise
    except (MeshcError, KeyError, TypeError, ValueError, AttributeError) as error:
        kind = "" if isinstance(error, MeshcError) else f"{type(error).__name__} "
        raise ArtifactError(f"{folder / PROGRAM} does not describe a program: {kind}{error}") from error


class Weights:
    """The weights of a saved program on disk, read a slice at a time. Use as a context manager, or `close` it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stack = contextlib.ExitStack()
        with _readable(path):
            self._file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        self.names: tuple[str, ...] = tuple(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape."""
        return tuple(self._file.get_slice(self._known(name)).get_shape())

    def slice(self, name: str, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """The part of a weight between (start, stop) of each dim, a range for each dim; only that part is read.

        Ranges end where the weight does: a tile that lies in the padding comes back shorter, or empty.
        """
        shape = self.shape(name)
        if len(ranges) != len(shape) or any(start < 0 or stop < start for start, stop in ranges):
            raise ArtifactError(f"{self.path}: {name} has shape {list(shape)}, which {list(ranges)} is no slice of")
        inside = tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in zip(ranges, shape, strict=True))
        found: torch.Tensor = self._file.get_slice(name)[inside]
        return found

    def tensor(self, name: str) -> torch.Tensor:
        """A whole weight."""
        found: torch.Tensor = self._file.get_tensor(self._known(name))
        return found

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self, name: str) -> str:
        if name not in self.names:
            raise ArtifactError(f"{self.path} has no weight {name!r}; it has {len(self.names)}: {', '.join(self.names[:8])}, ...")
        return name


def open_weights(path: str | os.PathLike[str], *, check_all: bool | None = None) -> Weights:
    """The weights of the program in the folder `path`, to be read slice by slice.

    Their hash is checked first if `check_all`, by default if they hold at most `HASHED_BYTES`; their size always is.
    Raises ArtifactError if the program was saved without weights or they are damaged.
    """
    folder = Path(path)
    files = _manifest(folder)
    if WEIGHTS not in files:
        raise ArtifactError(f"{folder} was saved without weights; save it with them, or load them into the running program")
    hashed = files[WEIGHTS]["bytes"] <= HASHED_BYTES if check_all is None else check_all
    _check(folder, WEIGHTS, files[WEIGHTS], editable=False, allow_edited=False, hashed=hashed)
    return Weights(folder / WEIGHTS)


def load_weights(path: str | os.PathLike[str], names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Whole weights by name, all of them or those named."""
    with open_weights(path) as weights:
        return {name: weights.tensor(name) for name in (weights.names if names is None else names)}


def _described(program: Program) -> dict[str, Any]:
    return {
        "mesh": str(program.mesh),
        "plan": str(program.plan),
        "mode": program.mode,
        "microbatches": program.microbatches,
        "axis_sizes": program.axis_sizes,
        "inputs": [_port_row(port) for port in program.inputs],
        "outputs": [_port_row(port) for port in program.outputs],
        "stages": list(program.stages),
        "schedule": [_without_defaults(instruction) for instruction in program.schedule],
        **({"pipeline": written.described(program.pipeline)} if program.pipeline is not None else {}),
        "notes": list(program.notes),
        **({"sizes": print_sizes(program.dynamic), "constraints": list(program.constraints)} if program.dynamic else {}),
        "info": {name: value for name, value in program.info.items() if _is_json(value)},
        "side_table": {name: side_table(stage) for name, stage in program.stages.items()},
    }


def _program(folder: Path, told: Mapping[str, Any], files: Mapping[str, Any]) -> Program:
    stages = {}
    for name in told["stages"]:
        file = _listed(folder, f"stages/{name}.py", files)
        stages[name] = parse_stage(_text(file), told["side_table"].get(name), str(file))
        if stages[name].name != name:
            raise ArtifactError(f"{file} holds the stage {stages[name].name}, not {name}")
    dynamic = parse_sizes(told.get("sizes", ""))
    hints = {size.symbol: size.hint for size in dynamic}
    schedule = tuple(Instruction(**row) for row in told["schedule"])
    for instruction in schedule:
        if instruction.stage and instruction.stage not in stages:
            raise ArtifactError(f"{folder / PROGRAM}: the schedule runs {instruction.stage}, but the stages are {', '.join(stages)}")
    with _readable(folder / CONSTANTS), safe_open(folder / CONSTANTS, framework="pt", device="cpu") as file:
        constants = {name: file.get_tensor(name) for name in file.keys()}
    program = Program(
        stages,
        Mesh(told["mesh"]),
        Plan(told["plan"]),
        tuple(_port(row, hints) for row in told["inputs"]),
        tuple(_port(row, hints) for row in told["outputs"]),
        schedule,
        constants,
        {str(axis): int(size) for axis, size in told["axis_sizes"].items()},
        int(told["microbatches"]),
        str(told["mode"]),
        list(map(str, told["notes"])),
        dict(told["info"]),
        dynamic,
        tuple(_constraint(text, hints) for text in told.get("constraints", [])),
    )
    return _with_pipeline(program, told, folder) if "pipeline" in told else program


def _with_pipeline(program: Program, told: Mapping[str, Any], folder: Path) -> Program:
    try:
        program.pipeline = written.read(told["pipeline"])
        refuse_incomplete(program)
    except ScheduleError as error:
        raise ArtifactError(f"{folder / PROGRAM}, pipeline: {error}") from None
    return program


def _port_row(port: Port) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": port.kind, "name": port.name, "type": port_type(port)}
    return row | ({"of": port.of} if port.of else {}) | ({"requires_grad": True} if port.requires_grad else {})


def _constraint(text: str, hints: Mapping[str, int]) -> str:
    left, _, right = relation(text)
    parse_size(left, hints), parse_size(right, hints)
    return text


def _port(row: Mapping[str, Any], hints: Mapping[str, int]) -> Port:
    record = parse_one_type(row["type"], hints)
    if row["kind"] not in KINDS or record.dtype is None:
        raise ArtifactError(f"{row['kind']}:{row['name']} is no port: kinds are {', '.join(KINDS)}, and a port is a tensor")
    return Port(
        row["kind"], row["name"], record.shape, record.dtype, record.sharding, row.get("of", ""), bool(row.get("requires_grad", False))
    )


def _without_defaults(value: Instruction) -> dict[str, Any]:
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """The files that the manifest lists, each inside the folder and there."""
    if not folder.is_dir():
        kept = beside(Path(os.path.realpath(folder)), "old")
        hint = f"; a program whose replacement was cut short lies in {kept}" if kept.is_dir() else ""
        raise ArtifactError(f"there is no saved program at {folder}{hint}: `program.save(path)` makes such a folder")
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(f"{folder} is no saved program: it has no {MANIFEST}")
    manifest = _json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        found = f"{manifest.get('format')!r} version {manifest.get('version')!r}"
        raise ArtifactError(f"{folder} is {found}; this meshc reads {FORMAT!r} version {VERSION}: compile and save the program again")
    files = manifest.get("files")
    if not isinstance(files, dict):
        raise ArtifactError(f"{folder / MANIFEST} lists no files")
    for name, entry in files.items():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not pure.parts or pure.as_posix() != name:
            raise ArtifactError(f"{folder / MANIFEST} lists {name!r}, a path outside the program's folder: nothing was read")
        for part in (folder / pure, *(folder / parent for parent in pure.parents if parent.parts)):
            if part.is_symlink():
                raise ArtifactError(f"{part} is a link, which may lead out of the program's folder: nothing was read")
        if not (folder / pure).is_file():
            raise ArtifactError(f"{folder} is damaged: {name}, which its manifest lists, is missing; save or copy the program again")
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or not isinstance(entry.get("sha256"), str):
            raise ArtifactError(f"{folder / MANIFEST} has no size and hash for {name}")
    return files


def _listed(folder: Path, name: str, files: Mapping[str, Any]) -> Path:
    if name not in files:
        raise ArtifactError(f"{folder / MANIFEST} does not list {name}, which the program needs")
    return folder / name


def _check(folder: Path, name: str, entry: Mapping[str, Any], *, editable: bool, allow_edited: bool, hashed: bool) -> None:
    if editable and allow_edited:
        return
    size = (folder / name).stat().st_size
    found = _sha256(folder / name) if hashed or size != entry["bytes"] else entry["sha256"]
    if found == entry["sha256"]:
        return
    saved = f"{entry['bytes']} bytes with hash {entry['sha256'][:12]}"
    what = f"{folder / name} is not what was saved: it has {size} bytes with hash {found[:12]}, {saved} were written"
    fix = "if you edited it on purpose, load it with allow_edited=True (--allow-edited)" if editable else "save or copy the program again"
    raise ArtifactError(f"{what}; it was truncated or edited: {fix}")


def _is_text(name: str) -> bool:
    return name == PROGRAM or (name.startswith("stages/") and name.endswith(".py"))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ArtifactError(f"{file} cannot be read as text: {error}") from None


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(file))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{file} is no JSON, it was truncated or edited: {error}") from None
    if not isinstance(found, dict):
        raise ArtifactError(f"{file} holds no JSON object")
    return found


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; save or copy the program again") from None


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as safetensors takes them: on the host, contiguous, no two sharing storage."""
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


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
