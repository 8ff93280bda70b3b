"""Chunk lines of a plan: number of token chunks in which a step's head and loss run.

    chunk lm_head: 8
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import PlanLine, is_in

MOST: Final = 256
"""Largest number of chunks; each adds lines to the program."""


@dataclass(frozen=True, slots=True)
class ChunkLine(PlanLine):
    """The matrix product in the module that ``pattern`` names, and the loss computed from the product, run in ``count`` chunks."""

    pattern: str
    count: int

    def covers(self, module: str) -> bool:
        """Whether the line applies to operators of the module at this path."""
        return is_in(module, self.pattern)

    def __str__(self) -> str:
        return f"chunk {self.pattern}: {self.count}"


def read_chunk_line(line: Line, number: int) -> ChunkLine:
    names = "a chunk line names the module of the head, with * for any text, and a number of chunks: `chunk lm_head: 8`"
    pattern = line.expect(GLOB, names)
    line.expect(":", "then comes a colon, and a number of chunks")
    start = line.at
    count = int(line.expect(r"\d{1,6}", "a number of chunks belongs here"))
    if not 1 <= count <= MOST:
        line.fail(f"from 1 (whole) to {MOST} chunks", start)
    if not line.is_at_end:
        line.fail("a chunk line ends after its number")
    return ChunkLine(pattern, count, line=number, text=line.text.strip())
