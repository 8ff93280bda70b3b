"""Atomic writes of files and folders: written beside the target path, then exchanged with what is there.

    .p.meshc.new-1f0c9a3e     the folder that a save is writing, with a lock (flock) that ends with its process
    p.meshc                   the previous save or the new one: at every moment exactly one of the two
    .p.meshc.old              the previous save, between two renames, if the file system cannot exchange two names

Folders left by a killed process are removed by the next process that writes there; on a file system without locks, once they are a day
old.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from safetensors import SafetensorError

from meshc.errors import FileError

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ABANDONED_S: Final = 24 * 3600.0
"""Age in seconds from which a folder counts as abandoned on a file system without locks."""


def beside(target: Path, suffix: str) -> Path:
    """A hidden neighbour of `target`, on the same file system."""
    return target.parent / f".{target.name}.{suffix}"


def to_disk(path: Path) -> None:
    """Flushes a file's contents, or a folder's entries if the file system supports that, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def may_replace(target: Path, holding: str) -> bool:
    """Whether `target` does not exist, is an empty folder, or is a folder with the file `holding`."""
    return not target.exists() or (target / holding).is_file() or (target.is_dir() and not any(target.iterdir()))


def kept_aside(target: Path) -> str:
    """Text for the error that `target` does not exist: the path of the previous save, if a save was interrupted between two renames."""
    old = beside(Path(os.path.realpath(target)), "old")
    return f"; what was there before a save that was cut short lies in {old}: rename it to go on with it" if old.exists() else ""


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Context with a new folder beside `target`, to be filled and passed to `move_into_place`; it is removed at the end in any case."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_left_behind(target)
    with _locked_folder(target) as made:
        yield made


def move_into_place(made: Path, target: Path) -> None:
    """Moves `made` to `target` in one step and removes the previous `target`. Both are on one file system."""
    to_disk(made)
    if not target.exists():
        made.rename(target)
    elif not _exchange_names(made, target):
        old = beside(target, "old")
        _remove(old)
        target.rename(old)
        try:
            made.rename(target)
        except BaseException:
            old.rename(target)
            raise
    to_disk(target.parent)
    _remove(beside(target, "old"))


def write_text(target: str | os.PathLike[str], text: str, lasting: bool = True) -> None:
    """Writes a text file atomically; `lasting`: flushed to the disk when this returns. Raises FileError if it cannot be written."""
    write_file(target, lambda made: made.write_bytes(text.encode()), lasting)


def write_file(target: str | os.PathLike[str], write: Callable[[Path], object], lasting: bool = True) -> None:
    """Like `write_text`, with contents that the function `write` writes to a path.

    A target that is no regular file (/dev/stdout, a pipe) is written directly.
    """
    file = Path(os.path.realpath(target))
    with writing(Path(target)):
        if Path(target).exists() and not file.is_file():
            write(Path(target))
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(file)
        with _locked_folder(file) as folder:
            made = folder / file.name
            write(made)
            if file.exists():
                shutil.copymode(file, made)
            if lasting:
                to_disk(made)
            made.replace(file)
        if lasting:
            to_disk(file.parent)


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Context that converts errors of the operating system while `target` is written to a FileError with what to do."""
    try:
        yield
    except FileError:
        raise
    except (OSError, SafetensorError) as error:
        raise _refusal(target, error) from error


def _refusal(target: Path, error: OSError | SafetensorError) -> FileError:
    told = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    reason = os.strerror(number) if number else str(error)
    if number not in _FULL:
        return FileError(f"{target} cannot be written: {reason}\n  what to do: choose a path that this process may write")
    with contextlib.suppress(OSError):
        reason += f", {shutil.disk_usage(_nearest_existing_parent(target)).free / 1e6:.1f} MB are free there"
    return FileError(
        f"{target} cannot be written: {reason}\n"
        "  why: the disk is full, or a quota or a limit on the size of files is used up; nothing of it was kept, and what was there "
        "before is as it was\n"
        "  what to do: make room there, or choose a path on another disk"
    )


def _nearest_existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.is_dir())


# ------------------------------------------------------------------------------------------------------------ what is being written


@contextlib.contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """Context with a new folder beside `target`, locked while it is in use."""
    while True:
        made = beside(target, f"new-{secrets.token_hex(4)}")
        made.mkdir()
        descriptor = os.open(made, os.O_RDONLY)
        if _try_lock(descriptor) is not False and _is_same_file(made, descriptor):  # between mkdir and flock it looks abandoned
            break
        os.close(descriptor)
    try:
        yield made
    finally:
        _remove(made)
        os.close(descriptor)


def remove_left_behind(target: Path) -> None:
    """Removes folders that ended processes were writing for `target`."""
    name = re.compile(re.escape(beside(target, "new").name) + r"(-[0-9a-f]{8})?")
    with contextlib.suppress(OSError):
        for path in [path for path in target.parent.iterdir() if name.fullmatch(path.name) and not path.is_symlink()]:
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        locked = _try_lock(descriptor)
        if locked or (locked is None and time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_S):
            _remove(path)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Whether this process got the lock; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _exchange_names(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; returns False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))
