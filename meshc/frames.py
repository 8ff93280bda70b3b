"""User frames, in files outside torch, meshc and Python's standard library: predicates on files, the innermost frame, warnings there."""

from __future__ import annotations

import os
import sysconfig
import traceback
import warnings

import torch

from meshc.ir import Source
from meshc.package import FOLDER

OURS = f"{FOLDER}{os.sep}"
TORCH = tuple(f"{os.path.dirname(file)}{os.sep}" for file in (torch.__file__, os.path.realpath(torch.__file__)))
"""Torch's own folder, as imported and with links resolved. A library that builds on torch counts as the user's, whatever its name."""
PACKAGES = frozenset(("site-packages", "dist-packages"))
STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"


def is_torch(file: str) -> bool:
    return file.startswith(TORCH)


def is_users(file: str) -> bool:
    """Whether a file is the user's, or of an installed package other than torch and meshc."""
    standard = file.startswith(STANDARD) and not is_installed(file)
    return not is_torch(file) and not file.startswith(OURS) and not standard


def is_installed(file: str) -> bool:
    """Whether a file is of a package installed by pip or the system."""
    return not PACKAGES.isdisjoint(file.split(os.sep))


def innermost(stack: traceback.StackSummary) -> Source | None:
    """The innermost user frame of a stack; None if there is none."""
    for frame in reversed(stack):
        if is_users(frame.filename) and frame.lineno is not None:
            return Source(frame.filename, frame.lineno, (frame.line or "").strip())
    return None


def within_torchs_forward(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends in the forward of one of torch's own modules, behind the user's last line, or in torch.func's `functional_call`.
    What such a module stores in Python (the flat list of an RNN's weights) is derived from its parameters and rebuilt by the next call that
    needs it; `functional_call` restores what it changes."""
    for frame in reversed(stack):
        if is_users(frame.filename) or frame.filename.startswith(OURS):
            return False
        if is_torch(frame.filename) and frame.name in ("forward", "_functional_call"):
            return True
    return False


def warn_at_users_line(text: str) -> None:
    """Issue a UserWarning at the innermost user frame of the current stack."""
    place = innermost(traceback.extract_stack()) or Source()
    warnings.warn_explicit(text, UserWarning, place.file, place.line)
