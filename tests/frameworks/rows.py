"""Rows of docs/ecosystem.md: each is a check on real ranks, with what it is about and what comes of it.

    @row("torch", "averages of weights made before compiling", line="meshc.compile(averaged, mesh, args=...)")
    def averaged_before(mesh): ...

A row without a `line` works by nothing; one with `refused` raises, and its check holds the message against the advice that stands there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshc

Check = Callable[[Any], None]


@dataclass(frozen=True)
class Row:
    """
    check    a function of the mesh, on every rank
    library  what it needs beside torch, as it is imported ("torch" if nothing)
    what     what was tried
    line     the one line that it takes; "" if none
    refused  what to do in place of what is refused; "" if it works
    mesh     on which it is tried
    """

    check: Check
    library: str
    what: str
    line: str
    refused: str
    mesh: str

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def outcome(self) -> str:
        return "refused" if self.refused else "by one line" if self.line else "works"


class Rows(list[Row]):
    """Of one library."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self.library = library

    def row(self, what: str, *, line: str = "", refused: str = "", mesh: str = "tp=2") -> Callable[[Check], Check]:
        def entered(check: Check) -> Check:
            self.append(Row(check, self.library, what, line, refused, mesh))
            return check

        return entered


def refuses(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    """That the call raises, with these words."""
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value), raised.value
    if isinstance(raised.value, meshc.MeshcError):
        assert "what to do: " in str(raised.value)


def same(mine: Any, wanted: Any) -> None:
    """Equal within float64's roundings; a DTensor by its whole."""
    whole = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
    torch.testing.assert_close(whole.detach(), wanted.detach(), rtol=1e-9, atol=1e-9)


def same_parameters(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    theirs = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        same(parameter, theirs[name])


def shared_folder() -> Path:
    """A new folder, the same on all ranks."""
    found = [tempfile.mkdtemp()]
    dist.broadcast_object_list(found)
    return Path(found[0])


def under_torchrun(*command: str, folder: Path) -> str:
    """What a command prints that rank 0 starts under torchrun on two ranks of its own, in this folder; all ranks wait, and get it.
    Raises AssertionError with what it said if it fails."""
    said: list[Any] = [True, ""]
    if dist.get_rank() == 0:
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run([*torchrun, *command], cwd=folder, env=kept, capture_output=True, text=True, timeout=240)
        said = [ended.returncode == 0, ended.stdout if ended.returncode == 0 else f"{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"]
    dist.broadcast_object_list(said)
    assert said[0], said[1]
    return str(said[1])
