"""Parser of operator pins: the rest of a plan line after `pin op:`.

    lm_head/backward/mm.2: batch/dp, hidden[2]/cp, -/tp, partial/sp
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final

from meshc.ir.mesh import NAME
from meshc.ir.nodes import PHASES
from meshc.plan.cursor import FACTOR, Line
from meshc.plan.entries import AUTO, NOTHING, PARTIAL, PENDING, OperatorPin, OperatorSplit
from meshc.plan.plan_faults import suggest

BEGIN: Final = re.compile(r"op:(?=[\w.*?\[\]!/-]*\s*:)")
"""Beginning of an operator pin, as opposed to the pin of a parameter named `op`."""
_GLOB: Final = re.compile(r"[\w.*?\[\]!/-]+")
_NUMBER: Final = re.compile(r"\[[1-9]\d{0,3}\]")


def read_operator_pin(line: Line, number: int) -> OperatorPin:
    names = "a pin of operators names MODULES, MODULES/PHASE or MODULES/PHASE/OPERATOR, as in `op:lm_head/backward/mm`; * is any text"
    start = line.at
    pattern = line.expect(_GLOB, names)
    parts = pattern.split("/")
    if len(parts) > 3 or not all(parts[1:]) or pattern == "/":
        line.fail(names, start)
    if len(parts) > 1 and not any(fnmatchcase(phase, parts[1]) for phase in PHASES):
        line.fail(f"{parts[1]} is no phase{suggest(parts[1], PHASES)}; {names}", start)
    line.expect(":", f"after the pattern comes a colon, then what axes do: `pin op:{pattern}: batch/dp, -/tp`")
    splits: list[OperatorSplit] = []
    others: dict[str, list[str]] = {NOTHING: [], PARTIAL: []}
    seen: set[str] = set()
    while not seen or line.accept(","):
        at = line.at
        factor, which = _read_split_factor(line)
        if any((split.factor, split.number) == (factor, which) for split in splits):
            line.fail(f"{factor} is there twice: write its axes one after the other, `{factor}/dp/tp`", at)
        axes = _read_split_axes(line, factor, seen)
        if factor in others:
            others[factor] += axes
        else:
            splits.append(OperatorSplit(factor, tuple(axes), which))
    if not line.is_at_end:
        line.fail("separate what axes do by `,`, axes by `/`")
    return OperatorPin(pattern, tuple(splits), tuple(others[NOTHING]), tuple(others[PARTIAL]), number, line.text.strip())


def _read_split_factor(line: Line) -> tuple[str, int]:
    """A factor with its number among factors of that name, or a word in a factor's place."""
    says = "a pin of operators says what axes do: FACTOR/AXIS, -/AXIS for nothing, partial/AXIS for sums that wait, as in `batch/dp, -/tp`"
    start = line.at
    if line.accept(rf"{NOTHING}(?=\s*/)") is not None:
        return NOTHING, 1
    factor = line.expect(FACTOR, says)
    factor = PARTIAL if factor == PENDING else factor
    if factor in (AUTO, "_"):
        line.fail(f"{factor} is no factor: an axis that is left open is left out", start)
    which = None if factor == PARTIAL else line.accept(_NUMBER)
    if line.accept("!") is not None:
        line.fail("say it of an axis: `-/AXIS` is an axis that splits nothing", start)
    if not line.text.startswith("/", line.at):
        line.fail(f"a mesh axis follows, as in `{factor}/tp`: {says}", line.at)
    return factor, int(which[1:-1]) if which else 1


def _read_split_axes(line: Line, factor: str, seen: set[str]) -> list[str]:
    axes: list[str] = []
    while line.accept("/"):
        start = line.at
        axis = line.expect(NAME, f"a mesh axis follows `/`, as in `{factor}/tp`")
        if axis in seen:
            line.fail(f"{axis} is there twice: an axis does one thing in an operator", start)
        seen.add(axis)
        axes.append(axis)
    return axes
