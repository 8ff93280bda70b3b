"""Lines of a plan that change what is computed. Nothing adds them but a user, and they mean the same on every mesh.

    precision model.layers.*: float8 row     format of the products with a weight in these modules (`meshc/ir/formats.py`)
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from meshc.ir.formats import FORMATS
from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import PlanLine, is_in
from meshc.plan.plan_faults import suggest


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
    line.expect(":", f"then comes a colon, and a format: {', '.join(map(repr, FORMATS))}")
    start = line.at
    written = " ".join(line.expect(r"\S[^#]*", f"a format belongs here: {', '.join(map(repr, FORMATS))}").split())
    if written not in FORMATS:
        begun = [word for word in FORMATS if word.startswith(f"{written} ")]
        fix = f"; say what one scale covers: {', '.join(begun)}" if begun else suggest(written, FORMATS)
        line.fail(f"{written} is no format{fix}", start)
    return PrecisionLine(pattern, written)
