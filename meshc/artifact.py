"""Saved programs: a folder of texts, JSON and safetensors. Loading executes and unpickles nothing.

    manifest.json            format and version, mesh, torch version; size and SHA-256 of each text, size and header's SHA-256 of each file
                             of tensors, which carries its tensors' hashes (`meshc.files.tensor_file`); and a hash of all this
    program.json             ports, schedule or pipeline, plan, mesh, mode, backend, microbatches, notes, the stages' side tables
    stages/NAME.py           the stages, as `meshc.text` prints them
    traced.py                the traced graph that they were made of, for a proof; not there if it has no text, and may be removed
    constants.safetensors    constant tensors
    weights.safetensors      parameters and buffers, if they were saved along

A folder is complete or not there: `save` writes beside the path and exchanges the two (`meshc.files.folders`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, TypedDict, cast

import torch

from meshc.errors import ArtifactError, MeshcError
from meshc.files import seal, tensor_file
from meshc.files.folders import kept_aside, may_replace, move_into_place, replacing, to_disk, writing
from meshc.files.tensor_file import TensorFile
from meshc.ir import bounds, calls, op_name
from meshc.lazy_module import LazyModule
from meshc.program.program import BACKENDS, PlainProgram, Stage, TracedGraph
from meshc.text import libraries, program_description
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage

if TYPE_CHECKING:
    from meshc.check import consistency as checker
    from meshc.proof import program_proof
else:
    checker = LazyModule("meshc.check.consistency")
    program_proof = LazyModule("meshc.proof.program_proof")

FORMAT: Final = "meshc program"
VERSION: Final = 6
ZIGZAG: Final = 5
"""The first version whose zigzag order is today's."""
READ: Final = range(3, VERSION + 1)
"""Types of version 3 do not say in which order values lie, and before version 6 they call a partial sum pending. Of programs before version
3 it is not known which backend they were written for."""
MANIFEST: Final = "manifest.json"
PROGRAM: Final = "program.json"
TRACED: Final = "traced.py"
CONSTANTS: Final = "constants.safetensors"
WEIGHTS: Final = "weights.safetensors"
TENSORS: Final = (CONSTANTS, WEIGHTS)
AGAIN: Final = "save or copy the program again"


class ManifestEntry(TypedDict, total=False):
    """Manifest entry of a file: size, and the hash of a text or of a tensor file's header."""

    bytes: int
    sha256: str
    header: str


def save(program: PlainProgram, path: str | os.PathLike[str], weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write a program, and whole weights by name if given, to the folder `path`; a program that is there is replaced.

    Entries of `program.info` that JSON cannot hold are left out. Raises ArtifactError if the program has no text (an operator off the
    allow-list, for instance) or something else stands at `path`, FileError if it cannot be written; then nothing has changed there.
    """
    target = Path(os.path.realpath(path))
    if not may_replace(target, MANIFEST):
        raise ArtifactError(f"{path} exists and is no saved program: it is not replaced; remove it or choose another path")
    texts = {f"stages/{name}.py": text for name, text in program_description.texts(program).items()}
    if program.traced is not None:
        with contextlib.suppress(ArtifactError):  # an operator that no text may name: what the program runs in its place may be named
            texts[TRACED] = print_stage(program.traced.stage, program, comments=False)
    texts[PROGRAM] = json.dumps(program_description.describe_program(program), indent=1) + "\n"
    with writing(target), replacing(target) as made:
        (made / "stages").mkdir()
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8", newline="\n")
            to_disk(made / name)
        to_disk(made / "stages")
        files: dict[str, ManifestEntry] = {name: {"bytes": (made / name).stat().st_size, "sha256": _sha256(made / name)} for name in texts}
        for name, tensors in ((CONSTANTS, program.constants), (WEIGHTS, weights)):
            if tensors is not None:
                files[name] = cast(ManifestEntry, tensor_file.write(made / name, tensors))
        told = {"format": FORMAT, "version": VERSION, "torch": torch.__version__, "mesh": str(program.mesh)}
        (made / MANIFEST).write_text(seal.seal_text({**told, "files": dict(sorted(files.items()))}), encoding="utf-8")
        to_disk(made / MANIFEST)
        move_into_place(made, target)


def load(
    path: str | os.PathLike[str], *, allow_edited: bool = False, prove: bool = True, allow: Iterable[str] = (), own: bool = False
) -> PlainProgram:
    """The program in the folder `path`. Weights stay on disk, and are checked as they are read (`open_weights`).

    With `allow_edited`, `program.json` and the stages' texts may differ from their hashes; they are parsed and checked (`meshc.check`) in
    any case, and with `prove` an edited program is proved to be its traced graph still, unless `traced.py` is gone from the folder.
    `allow` names libraries beside torch's and meshc's whose operators programs may name in this process from now on (`mylib`,
    `mylib=package.module`); their modules are imported. `own`: it is this user's own, in a folder that nobody else can write: its
    lines are read as ever and compared with their hashes, and not checked.
    Raises ArtifactError for a folder that is missing, damaged, edited, of another version, or holds what no program may.
    """
    for words in allow:
        libraries.allow(words)
    folder = Path(path)
    files, version = _manifest(folder)
    edited = False
    for name, entry in files.items():
        if name in TENSORS or name == TRACED:  # what they hold is compared when it is read
            _check_size(folder, name, entry)
        elif not (_is_text(name) and allow_edited):
            _check(folder, name, entry, editable=_is_text(name))
        else:
            edited = edited or _sha256(folder / name) != entry["sha256"]
    for name in (PROGRAM, CONSTANTS):
        _listed_file(folder, name, files)
    told = cast(program_description.ProgramDescription, _json(folder / PROGRAM))
    try:
        program = _program(folder, told, files)
        if version < ZIGZAG and _has_orders(program):
            raise ArtifactError(f"{folder} is of version {version}, whose zigzag order is another one, and has attention in that order: "
                                "compile and save the program again")  # fmt: skip
        if not own:
            checker.check_program(program, str(folder / PROGRAM))
        if edited and prove:
            _refuse_unproved(program, folder)
        return program
    except ArtifactError as error:
        if str(folder) in str(error):
            raise
        raise ArtifactError(f"{folder / PROGRAM}: {error}") from error
    except (MeshcError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        kind = "" if isinstance(error, MeshcError) else f"{type(error).__name__} "
        raise ArtifactError(f"{folder / PROGRAM} does not describe a program: {kind}{error}") from error


def _refuse_unproved(program: PlainProgram, folder: Path) -> None:
    """Raises ArtifactError for an edited program that is not proved to be the traced graph that it came with."""
    if program.traced is None:
        return
    proof = program_proof.prove(program, program.traced.stage, program.constants)
    if proof.failures or proof.not_for_all:
        why = proof.failures[0].in_text(program) if proof.failures else f"not for all sizes: {proof.not_for_all}"
        raise ArtifactError(
            f"{folder} was edited, and is not proved to compute what it was compiled from:\n{why}\n"
            "  what to do: put the line right; or compare its numbers with the model's (`meshc verify PATH --model FILE.py:FUNCTION "
            f"--allow-edited`), and to run it as it is, whatever it computes, remove {folder / TRACED}"
        )


def open_weights(path: str | os.PathLike[str]) -> TensorFile:
    """The weights of the program in the folder `path`, to be read slice by slice; what is read is checked.

    Raises ArtifactError if the program was saved without weights or they are damaged.
    """
    folder = Path(path)
    files, _ = _manifest(folder)
    if WEIGHTS not in files:
        raise ArtifactError(f"{folder} was saved without weights; save it with them, or load them into the running program")
    return TensorFile(folder / WEIGHTS, cast(tensor_file.Seal, files[WEIGHTS]), AGAIN)


def _program(folder: Path, told: program_description.ProgramDescription, files: Mapping[str, ManifestEntry]) -> PlainProgram:
    def text_of(name: str) -> tuple[str, str]:
        file = _listed_file(folder, f"stages/{name}.py", files)
        return bounds.read_text(file), str(file)

    def constants() -> dict[str, torch.Tensor]:
        with TensorFile(folder / CONSTANTS, cast(tensor_file.Seal, files[CONSTANTS]), AGAIN) as held:
            return {name: held.tensor(name) for name in held.names}

    program = program_description.read_description(told, text_of, constants, str(folder / PROGRAM))
    if TRACED in files:
        program.traced = TracedGraph(lambda: _read_traced(folder, files[TRACED]))
    return program


def _read_traced(folder: Path, entry: ManifestEntry) -> Stage:
    _check(folder, TRACED, entry, editable=False)
    return parse_stage(bounds.read_text(folder / TRACED), None, str(folder / TRACED))


def _manifest(folder: Path) -> tuple[dict[str, ManifestEntry], int]:
    """The files that the manifest lists, each inside the folder and there, but for a traced graph that was removed; and its version."""
    if not folder.is_dir():
        raise ArtifactError(f"there is no saved program at {folder}{kept_aside(folder)}: `program.save(path)` makes such a folder")
    if not (folder / MANIFEST).is_file():
        raise ArtifactError(f"{folder} is no saved program: it has no {MANIFEST}{_backends_hint(folder)}")
    manifest = _json(folder / MANIFEST)
    version = manifest.get("version")
    if manifest.get("format") != FORMAT or type(version) is not int or version not in READ:
        found, known = f"{manifest.get('format')!r} version {version!r}", f"{READ[0]} to {VERSION}"
        raise ArtifactError(f"{folder} is {found}; this meshc reads {FORMAT!r} versions {known}: compile and save the program again")
    if not seal.has_valid_seal(bounds.read_text(folder / MANIFEST)):
        raise ArtifactError(f"{folder / MANIFEST} is not what was saved, it was damaged or edited; {AGAIN}")
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
        if not (folder / pure).is_file() and not _is_removed_graph(folder, name):
            raise ArtifactError(f"{folder} is damaged: {name}, which its manifest lists, is missing; save or copy the program again")
        hashed = "header" if name in TENSORS else "sha256"
        if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or not isinstance(entry.get(hashed), str):
            raise ArtifactError(f"{folder / MANIFEST} has no size and hash for {name}")
    return {name: cast(ManifestEntry, entry) for name, entry in files.items() if not _is_removed_graph(folder, name)}, version


def _is_removed_graph(folder: Path, name: str) -> bool:
    return name == TRACED and not (folder / name).exists()


def _has_orders(program: PlainProgram) -> bool:
    return any(op_name(node).startswith("meshc.attention_zigzag") for stage in program.stages.values() for node in calls(stage.graph))


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Whether the folder `path` has a saved program, intact or not."""
    return (Path(path) / MANIFEST).is_file()


def _backends_hint(folder: Path) -> str:
    """Advice for a folder with a program for each of several backends."""
    inside = [str(folder / name) for name in BACKENDS if is_saved(folder / name)]
    return f"; it holds programs, name one of them: {' or '.join(inside)}" if inside else ""


def _listed_file(folder: Path, name: str, files: Mapping[str, ManifestEntry]) -> Path:
    if name not in files:
        raise ArtifactError(f"{folder / MANIFEST} does not list {name}, which the program needs")
    return folder / name


def _check_size(folder: Path, name: str, entry: ManifestEntry) -> None:
    size = (folder / name).stat().st_size
    if size != entry["bytes"]:
        raise ArtifactError(f"{folder / name} is not what was saved: it has {size} bytes, {entry['bytes']} were written; {AGAIN}")


def _check(folder: Path, name: str, entry: ManifestEntry, *, editable: bool) -> None:
    size, found = (folder / name).stat().st_size, _sha256(folder / name)
    if found == entry["sha256"]:
        return
    saved = f"{entry['bytes']} bytes with hash {entry['sha256'][:12]}"
    what = f"{folder / name} is not what was saved: it has {size} bytes with hash {found[:12]}, {saved} were written"
    fix = "if you edited it on purpose, load it with allow_edited=True (--allow-edited)" if editable else AGAIN
    raise ArtifactError(f"{what}; it was truncated or edited: {fix}")


def _is_text(name: str) -> bool:
    return name == PROGRAM or (name.startswith("stages/") and name.endswith(".py"))


def _json(file: Path) -> dict[str, bounds.Json]:
    found = bounds.parse_json(bounds.read_text(file), str(file))
    if not isinstance(found, dict):
        raise ArtifactError(f"{file} holds no JSON object")
    return found


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
