"""Lines of a plan that change what is computed. Nothing adds them but a user, and they mean the same on every mesh.

    precision model.layers.*: float8 row     format of the products with a weight in these modules (`meshc/ir/formats.py`)
    precision model.layers.*: compute bf16, reduce f32, master f32     dtypes of these modules (docs/mixed-precision.md)
    precision model.layers.*: auto           float8 row, or none, for each kind of these products, as a call is predicted to be faster
    sparse model.layers.*: 2:4               of each 4 weights that a product sums over, the 2 largest count (`docs/sparsity.md`)
    sparse model.layers.*: 2:4, decay 1e-3   by how much the others go towards zero in each step, beside what the gradient says
    sparse model.layers.*: 2:4, fixed        the others are zero from the first step on
    sparse model.layers.*: 2:4, every 10     which are the largest is decided anew every 10 steps, with `until 1000` up to that step
    compress dp: int8                        gradients over an axis of data in fewer bits (docs/compressed-gradients.md)
    compress dp: sign of 4 parts             the batch is cut in 4 parts, whatever the axis's size
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import torch

from meshc.ir.formats import COMPRESSED, FORMATS
from meshc.ir.mesh import NAME
from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import AUTO, ModuleLine, PlanLine
from meshc.plan.plan_faults import suggest

NUMBER: Final = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?"
DECAY: Final = 2e-4
"""Of sparse lines that say none: the default of Zhou et al. 2021 (arXiv 2102.04010)."""
MOST_IN_GROUP: Final = 64
"""Largest M of a sparse line."""


@dataclass(frozen=True, slots=True)
class ProductLine(ModuleLine):
    """A line about the products with a weight in the modules that ``pattern`` names and in those in them; of several lines of a kind the
    last one counts."""

    def names(self, module: str) -> bool:
        """Whether the line names the module itself, not only what it is in: its last part is no `*`, and the path fits."""
        return self.pattern.rpartition(".")[2] != "*" and fnmatchcase(module, self.pattern)


@dataclass(frozen=True, slots=True)
class PrecisionLine(ProductLine):
    """Format of products; AUTO: the compiler chooses one, or none, for each kind of them."""

    format: str

    def __str__(self) -> str:
        return f"precision {self.pattern}: {self.format}"


@dataclass(frozen=True, slots=True)
class SparseLine(ProductLine):
    """Products that read n of each m consecutive weights along the dim that is summed over, the largest in magnitude.

    decay  times a weight that is not read is added to its gradient
    fixed  weights that are not read have no gradient, and are zero from the first step on
    every  the number of steps after which masks are made anew; 0: wherever a product reads the weight
    until  the last step before which they are; None: all
    """

    n: int
    m: int
    decay: float = DECAY
    fixed: bool = False
    every: int = 0
    until: int | None = None

    def __str__(self) -> str:
        more = f", every {self.every}" * bool(self.every) + ("" if self.until is None else f" until {self.until}")
        more += ", fixed" if self.fixed else f", decay {self.decay!r}" if self.decay != DECAY else ""
        return f"sparse {self.pattern}: {self.n}:{self.m}{more}"


DTYPES: Final[Mapping[str, torch.dtype]] = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""Dtypes as a compute line names them."""
DTYPE_WORDS: Final = ", ".join(DTYPES)


@dataclass(frozen=True, slots=True)
class ComputeLine(ProductLine):
    """Dtypes of modules: in which they compute, in which gradients of their parameters are summed over ranks ("": as they compute), and in
    which parameters are stored and updated ("": as the model has them)."""

    compute: str
    reduce: str = ""
    master: str = ""

    @property
    def dtypes(self) -> tuple[str, str]:
        return self.compute, self.reduce or self.compute

    def __str__(self) -> str:
        more = [f"{word} {dtype}" for word, dtype in (("reduce", self.reduce), ("master", self.master)) if dtype]
        return ", ".join([f"precision {self.pattern}: compute {self.compute}", *more])


def _read_compute(line: Line, pattern: str) -> ComputeLine:
    """The rest of a compute line, behind its colon."""
    words: dict[str, str] = {}
    while True:
        start = line.at
        word = line.expect(r"(compute|reduce|master)\b", "behind the comma stands `reduce DTYPE` or `master DTYPE`")
        if word in words:
            line.fail(f"{word} is there twice", start)
        start = line.at
        dtype = line.expect(r"[\w.]+", f"a dtype belongs here: {DTYPE_WORDS}")
        if dtype not in DTYPES:
            line.fail(f"{dtype} is no dtype{suggest(dtype, DTYPES)}; dtypes are {DTYPE_WORDS}", start)
        words[word] = dtype
        if word == "reduce" and dtype not in (words["compute"], "f32"):
            line.fail(
                f"gradients are summed in the dtype in which they are computed, {words['compute']}, or in f32: in fewer bits a sum "
                "would depend on the mesh; a `compress` line sends fewer and keeps what rounding loses",
                start,
            )
        if not line.accept(","):
            line.expect_end("a comma, and `reduce DTYPE` or `master DTYPE`, or the end of the line")
            return ComputeLine(pattern, words["compute"], words.get("reduce", ""), words.get("master", ""))


def read_precision_line(line: Line) -> PrecisionLine | ComputeLine:
    names = "a precision line names modules, with * for any text, and a format: `precision model.layers.*: float8 row`"
    pattern = line.expect(GLOB, names)
    formats = ", ".join(map(repr, (*FORMATS, AUTO)))
    line.expect(":", f"then comes a colon, and a format: {formats}")
    start = line.at
    if re.match(r"compute\b", line.text[line.at :]):
        return _read_compute(line, pattern)
    written = " ".join(line.expect(r"\S[^#]*", f"a format belongs here: {formats}").split())
    if written not in (*FORMATS, AUTO):
        begun = [word for word in FORMATS if word.startswith(f"{written} ")]
        fix = f"; say what one scale covers: {', '.join(begun)}" if begun else suggest(written, (*FORMATS, AUTO))
        line.fail(f"{written} is no format{fix}", start)
    return PrecisionLine(pattern, written)


def read_sparse_line(line: Line) -> SparseLine:
    names = "a sparse line names modules, with * for any text, and how many weights are left of how many: `sparse model.layers.*: 2:4`"
    pattern = line.expect(GLOB, names)
    line.expect(":", "then comes a colon, and how many weights are left of how many: `2:4`")
    start = line.at
    written = line.expect(r"\d+\s*:\s*\d+", "how many weights are left of how many belongs here: `2:4`")
    n, m = map(int, written.split(":"))
    if not 0 < n < m <= MOST_IN_GROUP:
        line.fail(f"{n}:{m} leaves {n} of {m} weights: from 1 to {MOST_IN_GROUP - 1} are left of more, {MOST_IN_GROUP} at most", start)
    decay, fixed, every, until = DECAY, False, 0, None
    comma = line.accept(",")
    if comma and line.accept(r"every\b") is not None:
        every = _read_count(line, "steps after which masks are made anew", 1)
        if line.accept(r"until\b") is not None:
            until = _read_count(line, "the step from which masks stay as they are", 0)
        comma = line.accept(",")
    if comma:
        fixed = not every and line.accept(r"fixed\b") is not None
        if not fixed:
            others = "" if every else ", `every COUNT`, or `fixed`: when masks are made anew, and what weights do that are not read"
            line.expect(r"decay\b", f"behind the comma stands `decay NUMBER`{others}")
            start = line.at
            decay = float(line.expect(NUMBER, f"a decay is a number from 0 on, such as {DECAY!r}"))
            if decay == float("inf"):
                line.fail("this number is too large", start)
    line.expect_end("a sparse line ends after `every COUNT`, `until STEP`, `decay NUMBER` or `fixed`")
    return SparseLine(pattern, n, m, decay, fixed, every, until)


def _read_count(line: Line, what: str, least: int) -> int:
    start = line.at
    count = int(line.expect(r"\d{1,9}", f"a number belongs here: {what}, as in `2:4, every 10 until 1000`"))
    if count < least:
        line.fail(f"{count} is too small a number of {what}", start)
    return count


@dataclass(frozen=True, slots=True)
class CompressLine(PlanLine):
    """Format in which gradients travel over an axis of data, or what stages of a pipeline send each other over theirs. `parts`: in
    how many parts the batch is cut; None: as many as the axis has ranks."""

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
    axis = line.expect(NAME.pattern, "a compress line names an axis of data or of a pipeline, and a format: `compress dp: int8`")
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
