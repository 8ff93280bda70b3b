"""Cache of compiled kernels between processes, in `MESHC_CACHE` (default `~/.cache/meshc`), writable by its owner only.

    philox-1f0c....so      a shared library, followed by the SHA-256 of its bytes
    .philox-1f0c....lock   locked (flock) by the one process that builds; the others wait, then load the result

Loading a library runs its code. So a folder that other users can write, directly or through a parent folder, is not used: the kernel is
then built for this process alone, with a warning. A file that others can write, a link, or a file with a wrong hash is built again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from meshc import environment
from meshc.files import private_folders

_DIGEST_BYTES = 32


def library(name: str, build: Callable[[Path], None]) -> ctypes.CDLL:
    """The shared library `name`, which `build(file)` makes if the cache does not have it. Raises what `build` raises, and OSError."""
    folder = environment.cache_folder()
    why = private_folders.refusal(folder)
    file = folder.absolute().resolve() / name
    if why is None and _is_good(file, tell=True):
        return ctypes.CDLL(str(file))
    if why is None and not os.access(file.parent, os.W_OK):
        why = "it cannot be written"
    if why is not None:
        _warn(f"the kernel cache {folder} is not used: {why}; the kernel {name} is compiled for this process alone")
        return _for_this_process(name, build)
    with _building(file.parent, name):
        if not _is_good(file):
            _make(file.parent, file, build)
    return ctypes.CDLL(str(file))


def _is_good(file: Path, tell: bool = False) -> bool:
    """Whether the file exists, can be written by nobody else, and has the right hash. `tell`: warn if not."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError as error:
        if tell:
            _warn(f"the kernel {file} is not loaded but compiled again: {error.strerror}")
        return False
    with open(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        fault = private_folders.open_to_others(found) if stat.S_ISREG(found.st_mode) else "is no file"
        if fault is None:
            data = opened.read()
            fault = "is not what was built" if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:] else None
    if fault is not None and tell:
        _warn(f"the kernel {file} is not loaded but compiled again: it {fault}")
    return fault is None


@contextlib.contextmanager
def _building(folder: Path, name: str) -> Iterator[None]:
    """Context of one building process at a time. The lock ends with its process; without locks all build, and the last result stays."""
    descriptor = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in folder.glob(f".build-{name}-*"):  # left by a process that was ended
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _make(folder: Path, file: Path, build: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=f".build-{file.name}-", dir=folder, ignore_cleanup_errors=True) as place:
        made = Path(place) / "out.so"
        build(made)
        data = made.read_bytes()
        with made.open("ab") as opened:
            opened.write(hashlib.sha256(data).digest())
            opened.flush()
            os.fsync(opened.fileno())
        made.chmod(0o700)
        os.replace(made, file)


def _for_this_process(name: str, build: Callable[[Path], None]) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="meshc-", ignore_cleanup_errors=True) as place:  # mode 0700; a loaded library needs no name
        build(Path(place) / name)
        return ctypes.CDLL(str(Path(place) / name))


def _warn(text: str) -> None:
    warnings.warn(
        f"{text}\n"
        "  why: loading a library runs it, so meshc loads none that another user can have written\n"
        "  what to do: give MESHC_CACHE a folder that only you can write, on a path that only you and root can change",
        RuntimeWarning,
        stacklevel=4,
    )
