"""Checks, by owners and modes, that only this user and root can write in a folder, which is created if missing; the fault as text."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def refusal(folder: Path) -> str | None:
    """Why other users may write in the folder; None if they cannot. Creates the folder if it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        real = folder.resolve(strict=True)
        for place in (real, *real.parents):
            found = place.stat()
            above = place != real and bool(found.st_mode & stat.S_ISVTX)  # sticky, as /tmp: users can move only their own entries
            fault = open_to_others(found) if not above else None
            if fault is not None:
                return f"{place} {fault}"
    except OSError as error:
        return str(error)
    return None


def open_to_others(found: os.stat_result) -> str | None:
    """Text that says why a user other than this one and root may change a file; None if none may."""
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {found.st_uid})"
    if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid)):
        return f"can be written by others (mode {stat.S_IMODE(found.st_mode):04o}): chmod go-w"
    return None


def _is_private(group: int) -> bool:
    """Whether a group is this user's private group, of the user's name and without other members, or root's."""
    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name in (user, "root") and set(entry.gr_mem) <= {user, "root"}
