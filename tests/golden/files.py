"""The two files of a golden program, and how they differ from what is compiled now."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from meshc.program.program import PlainProgram
from meshc.text.printer import print_program
from tests.golden.fingerprint import fingerprint

FOLDER: Final = Path(__file__).parent / "programs"
TORCH: Final = ".".join(torch.__version__.split(".")[:2])
OPERATORS: Final = re.compile(r"^operators.*?\n\n", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Golden:
    """One program's text and fingerprint, made by torch of the release `torch` (another may trace other operators)."""

    text: str
    fingerprint: str
    torch: str = TORCH

    @staticmethod
    def of(program: PlainProgram) -> Golden:
        return Golden(print_program(program, comments=False), fingerprint(program))

    @staticmethod
    def read(name: str) -> Golden | None:
        """What is stored; None if nothing is."""
        text, prints = _paths(name)
        if not text.exists() or not prints.exists():
            return None
        head, _, rest = prints.read_text().partition("\n")
        return Golden(text.read_text(), rest, head.removeprefix("torch "))

    def write(self, name: str) -> None:
        text, prints = _paths(name)
        text.parent.mkdir(exist_ok=True)
        text.write_text(self.text)
        prints.write_text(f"torch {self.torch}\n{self.fingerprint}")

    def differences(self, now: Golden) -> tuple[list[str], list[str]]:
        """Of the fingerprint and of the text, as lines of a diff; under another torch, of what does not hang on its operators."""
        if self.torch == now.torch:
            return _diff(self.fingerprint, now.fingerprint), _diff(self.text, now.text)
        return _diff(OPERATORS.sub("", self.fingerprint), OPERATORS.sub("", now.fingerprint)), []


def _paths(name: str) -> tuple[Path, Path]:
    stem = name.replace(" ", "_")
    return FOLDER / f"{stem}.txt", FOLDER / f"{stem}.fingerprint"


def _diff(stored: str, now: str) -> list[str]:
    lines = difflib.unified_diff(stored.splitlines(), now.splitlines(), "stored", "now", lineterm="", n=1)
    return list(lines)
