"""On-disk cache of compiled programs: a restarted job loads its program from a folder.

    FOLDER/3f9c...e1/            its first half: what is known before a compilation (meshc.api.job_key); its second: what the trace has read
        program/                 the saved program (meshc.artifact), with its hashes
        compiled.json            what else a compilation leaves, as JSON; the hash of program's manifest; a hash of all this

An entry is complete or not there, and never changed: it is written beside its place and renamed. What is read is compared with its hashes;
one that is damaged, or another's, is told of, and compiled again. Of a folder that others may write nothing is read or written, so that
what is there is this user's own. When all entries together grow beyond MOST bytes, those go that were not used for longest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshc import artifact, environment
from meshc.errors import ArtifactError, FileError, MeshcError
from meshc.files import private_folders, seal
from meshc.files.folders import move_into_place, replacing, to_disk, writing
from meshc.ir import bounds
from meshc.program.program import PlainProgram
from meshc.text import libraries

MOST: Final = 1 << 30
"""Bytes."""
FORMAT: Final = "meshc compiled program"
VERSION: Final = 2
NOT_KEPT: Final = "not kept for a next start: "
"""How the note of a program begins that has no key, or no form on disk."""
_TOLD: Final = "compiled.json"
_PROGRAM: Final = "program"
_NAME: Final = re.compile(r"[0-9a-f]{32}")
_HALF: Final = 16
"""Digits of a name."""


@dataclass(frozen=True)
class StoredProgram:
    """A cached program, and the JSON data that was stored with it."""

    program: PlainProgram
    told: Mapping[str, Any]


@dataclass(frozen=True)
class Amount:
    programs: int
    bytes: int


def default_folder() -> Path:
    """The default folder of cached programs."""
    return environment.cache_folder() / "programs"


def name_of(key: str, depends: str) -> str:
    """Name of an entry: digits of its key, and a hash of key and `depends`."""
    return f"{key[:_HALF]}{hashlib.blake2b((key + depends).encode(), digest_size=_HALF // 2).hexdigest()}"


def under(folder: Path, key: str) -> list[str]:
    """Names of the entries under a key, most recently used first; none for an empty key."""
    found = [path for path in _entries(folder) if key and path.name.startswith(key[:_HALF])]
    return [path.name for path in sorted(found, key=_used, reverse=True)] if found and not _not_used(folder) else []


def read_program(folder: Path, name: str, wanted: Callable[[Mapping[str, Any]], bool]) -> StoredProgram | None:
    """The entry `name`, if `wanted(told)` holds for its stored data; None otherwise, or if the entry is damaged."""
    place = folder / name
    try:
        told = _read_description(place, name)
        if not wanted(told):
            return None
        with libraries.trust_libraries():  # which of them a program may name, its key says: they are this process's own
            program = artifact.load(place / _PROGRAM, own=True)
    except (MeshcError, OSError, LookupError, TypeError, ValueError) as error:
        warnings.warn(
            f"a program that was kept is not used, and compiled again: {error}\n"
            f"  what to do: nothing, unless it comes again: then look who else writes to {folder}",
            stacklevel=3,
        )
        drop(folder, name)
        return None
    with contextlib.suppress(OSError):
        os.utime(place)
    return StoredProgram(program, told)


def _read_description(place: Path, name: str) -> Mapping[str, Any]:
    text = bounds.read_text(place / _TOLD)
    if not seal.has_valid_seal(text):
        raise ArtifactError(f"{place / _TOLD} was damaged or edited")
    told = bounds.parse_json(text, str(place / _TOLD))
    if not isinstance(told, dict) or (told.get("format"), told.get("version"), told.get("name")) != (FORMAT, VERSION, name):
        raise ArtifactError(f"{place / _TOLD} is no entry of this name, or of another version")
    if told["program"] != _manifest(place):
        raise ArtifactError(f"{place / _PROGRAM} is another program than {_TOLD} was written for")
    return told


def write(folder: Path, name: str, program: PlainProgram, told: Mapping[str, object]) -> str:
    """Writes a program, unless the entry exists. Returns the reason if it cannot be written, else ""."""
    place = folder / name
    why = private_folders.refusal(folder)
    if why is not None or place.is_dir():
        return why or ""
    try:
        with writing(place), replacing(place) as made:
            artifact.save(program, made / _PROGRAM)
            head = {"format": FORMAT, "version": VERSION, "name": name, "program": _manifest(made)}
            (made / _TOLD).write_text(seal.seal_text({**head, **told}), encoding="utf-8")
            to_disk(made / _TOLD)
            move_into_place(made, place)
        _drop_old(folder)
    except (ArtifactError, FileError, OSError, TypeError, ValueError) as error:
        return "" if place.is_dir() else str(error)  # another job has just put it there
    return ""


def drop(folder: Path, name: str) -> None:
    """Deletes an entry."""
    shutil.rmtree(folder / name, ignore_errors=True)


def size(folder: Path) -> Amount:
    """Number of programs in the folder, and their bytes."""
    entries = _entries(folder)
    return Amount(len(entries), sum(map(_bytes, entries)))


def _manifest(place: Path) -> str:
    return hashlib.sha256((place / _PROGRAM / artifact.MANIFEST).read_bytes()).hexdigest()


def _not_used(folder: Path) -> bool:
    why = private_folders.refusal(folder)
    if why is not None:
        warnings.warn(f"programs kept in {folder} are not used: {why}\n  what to do: give a folder that only you can write", stacklevel=4)
    return why is not None


def _entries(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _used(entry: Path) -> float:
    with contextlib.suppress(OSError):  # another process has just dropped it
        return entry.stat().st_mtime
    return 0.0


def _bytes(entry: Path) -> int:
    with contextlib.suppress(OSError):  # another process has just dropped it
        return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
    return 0


def _drop_old(folder: Path, most: int = MOST) -> None:
    """Deletes the least recently used entries beyond `most` bytes. A process that reads one meanwhile misses a file, and compiles."""
    with contextlib.suppress(OSError):
        total = 0
        for entry in sorted(_entries(folder), key=_used, reverse=True):
            total += _bytes(entry)
            if total > most:
                shutil.rmtree(entry, ignore_errors=True)
