"""Folders that are complete or not there: written beside their path, then renamed; what was there before survives until then."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def beside(target: Path, suffix: str) -> Path:
    """A hidden neighbour of `target`, on the same file system."""
    return target.parent / f".{target.name}.{suffix}"


def to_disk(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(made: Path, target: Path) -> None:
    """Rename `made` to `target`. What is there is kept under another name until then, and put back if that fails."""
    old = beside(target, "old")
    if not target.exists():
        made.rename(target)
    else:
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        try:
            made.rename(target)
        except BaseException:
            old.rename(target)
            raise
    shutil.rmtree(old, ignore_errors=True)


def may_replace(target: Path, holding: str) -> bool:
    """Whether nothing stands at `target`, or an empty folder, or one that holds this file."""
    return not target.exists() or (target / holding).is_file() or (target.is_dir() and not any(target.iterdir()))
