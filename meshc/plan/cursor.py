"""Cursor over one line of a plan: words taken by patterns, or a fault with the column and what to write there."""

from __future__ import annotations

import re
from typing import Final, NoReturn

FACTOR: Final = re.compile(r"(?:\w[\w-]*|\*(?=\.))(?:\.(?:\w[\w-]*|\*))*")
GLOB: Final = re.compile(r"[\w.*?\[\]!-]+")


class PlanLineFault(Exception):
    def __init__(self, column: int, fix: str) -> None:
        self.column = column
        self.fix = fix


class Line:
    """A cursor over one line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.skip()

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    @property
    def is_at_end(self) -> bool:
        return self.at == len(self.text)

    def accept(self, pattern: str | re.Pattern[str]) -> str | None:
        match = re.compile(pattern).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        self.skip()
        return match[0].strip()

    def expect(self, pattern: str | re.Pattern[str], fix: str) -> str:
        found = self.accept(pattern)
        return self.fail(fix) if found is None else found

    def expect_end(self, fix: str) -> None:
        if not self.is_at_end:
            self.fail(fix)

    def fail(self, fix: str, at: int | None = None) -> NoReturn:
        raise PlanLineFault(self.at if at is None else at, fix)
