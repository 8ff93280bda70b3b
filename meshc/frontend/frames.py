"""Which lines of a stack are the user's: those that are neither torch's nor meshc's, nor of Python's own library."""

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
"""Torch's own folder, as modules are found in it and without links. A library that builds on torch is its user's, whatever it is called."""
PACKAGES = frozenset(("site-packages", "dist-packages"))
STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"


def is_torch(file: str) -> bool:
    return file.startswith(TORCH)


def is_users(file: str) -> bool:
    """Whether a file is the user's, or of a package that they have installed."""
    standard = file.startswith(STANDARD) and not is_installed(file)
    return not is_torch(file) and not file.startswith(OURS) and not standard


def is_installed(file: str) -> bool:
    """Whether a file is of a package that pip, or the system, has installed."""
    return not PACKAGES.isdisjoint(file.split(os.sep))


def innermost(stack: traceback.StackSummary) -> Source | None:
    """The user's line that a stack ends in, as far as torch and meshc go."""
    for frame in reversed(stack):
        if is_users(frame.filename) and frame.lineno is not None:
            return Source(frame.filename, frame.lineno, (frame.line or "").strip())
    return None


def within_torchs_forward(stack: traceback.StackSummary) -> bool:
    """Whether a stack ends in the forward of a module of torch's own, behind the user's last line. What such a module keeps in Python (the
    flat list of an RNN's weights) is made of its parameters, and made again by the next call that needs it. Or in torch.func's
    `functional_call`, which puts back what it changes."""
    for frame in reversed(stack):
        if is_users(frame.filename) or frame.filename.startswith(OURS):
            return False
        if is_torch(frame.filename) and frame.name in ("forward", "_functional_call"):
            return True
    return False


def warn_at_users_line(text: str) -> None:
    """A warning at the innermost line of the user's that led here."""
    users = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    warnings.warn_explicit(text, UserWarning, *((users[-1].filename, users[-1].lineno or 0) if users else ("", 0)))
