"""Lines of a plan that change what is computed. Nothing adds them but a user, and they mean the same on every mesh.

    precision model.layers.*: float8 row     format of the products with a weight in these modules (`meshc/ir/formats.py`); `bf16` too
    compress dp: int8                        gradients over an axis of data in fewer bits (docs/compressed-gradients.md)
    compress dp: sign of 4 parts             the batch is cut in 4 parts, whatever the axis's size
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from meshc.ir.formats import BF16, COMPRESSED, FORMATS
from meshc.ir.mesh import NAME
from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import PlanLine, is_in
from meshc.plan.plan_faults import suggest

WORDS: Final = (*FORMATS, BF16)
"""What may stand behind the colon of a precision line."""


@dataclass(frozen=True, slots=True)
class PrecisionLine(PlanLine):
    """Format of the products of the modules that ``pattern`` names and of those in them; of several lines the last one counts."""

    pattern: str
    format: str

    def covers(self, module: str) -> bool:
        """Whether the line applies to products of the module at this path."""
        return is_in(module, self.pattern)

    def names(self, module: str) -> bool:
        """Whether the line names the module itself, not only what it is in: its last part is no `*`, and the path fits."""
        return self.pattern.rpartition(".")[2] != "*" and fnmatchcase(module, self.pattern)

    def __str__(self) -> str:
        return f"precision {self.pattern}: {self.format}"


def read_precision_line(line: Line) -> PrecisionLine:
    names = "a precision line names modules, with * for any text, and a format: `precision model.layers.*: float8 row`"
    pattern = line.expect(GLOB, names)
    line.expect(":", f"then comes a colon, and a format: {', '.join(map(repr, WORDS))}")
    start = line.at
    written = " ".join(line.expect(r"\S[^#]*", f"a format belongs here: {', '.join(map(repr, WORDS))}").split())
    if written not in WORDS:
        begun = [word for word in WORDS if word.startswith(f"{written} ")]
        fix = f"; say what one scale covers: {', '.join(begun)}" if begun else suggest(written, WORDS)
        line.fail(f"{written} is no format{fix}", start)
    return PrecisionLine(pattern, written)


@dataclass(frozen=True, slots=True)
class CompressLine(PlanLine):
    """Format in which gradients travel over an axis. `parts`: in how many parts the batch is cut; None: as many as the axis has ranks."""

    axis: str
    format: str
    parts: int | None = None

    def count(self, ranks: int) -> int:
        """Number of parts on an axis of so many ranks."""
        return ranks if self.parts is None else self.parts

    def __str__(self) -> str:
        return f"compress {self.axis}: {self.format}" + ("" if self.parts is None else f" of {self.parts} parts")


def read_compress_line(line: Line) -> CompressLine:
    formats = ", ".join(map(repr, COMPRESSED))
    axis = line.expect(NAME.pattern, "a compress line names an axis of data, and a format: `compress dp: int8`")
    line.expect(":", f"then comes a colon, and a format: {formats}")
    start = line.at
    format = line.expect(r"[\w.-]+", f"a format belongs here: {formats}")
    if format not in COMPRESSED:
        line.fail(f"{format} is no format of gradients{suggest(format, COMPRESSED)}; formats are {formats}", start)
    if line.is_at_end:
        return CompressLine(axis, format)
    line.expect(r"of\b", "behind the format may stand the number of parts of the batch: `compress dp: int8 of 4 parts`")
    start = line.at
    parts = int(line.expect(r"\d{1,6}", "a number of parts belongs here: `compress dp: int8 of 4 parts`"))
    if parts < 1:
        line.fail("a batch has at least one part", start)
    line.expect(r"parts?\b", "`parts` belongs here: `compress dp: int8 of 4 parts`")
    return CompressLine(axis, format, parts)
