"""Rows of docs/ecosystem.md: each is a check on real ranks, with what it is about and what comes of it.

    @row("torch", "averages of weights made before compiling", line="meshc.compile(averaged, mesh, args=...)")
    def averaged_before(mesh): ...

A row without a `line` works by nothing; one with `refused` raises, and its check holds the message against the advice that stands there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

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
