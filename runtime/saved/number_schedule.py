"""Schedule of the optimizer's numbers (learning rates) for `meshc run`, read from a file.

    {"step": 0, "lr": 1e-5}                                a row holds from its step on, until the next row's
    {"step": 100, "lr": [3e-4, 1e-4], "weight_decay": 0.1} a number is every group's, a list has one for each
    {"step": 200, "1.lr": 0.0}                             or the name that `meshc show` prints: group 1's

The file has a row a line, or is a JSON list of rows. Steps are the program's own, which a saved state goes on counting, so one file serves
a resumed job too. A number that no row has named yet has the value that the program was saved with.
Numbers of Python that the program takes are named as it names them: {"step": 0, "model.temperature": 1.0}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path

from meshc.errors import InputError, StateError, lines_of
from meshc.optimizer.spec import NumberGuard
from meshc.program.program import PlainProgram


class NumbersByStep:
    """The optimizer's numbers at each step. Raises InputError naming every fault of the file, StateError for numbers that the program was
    not compiled for."""

    def __init__(self, path: str | Path, program: PlainProgram) -> None:
        self.path = path
        self.saved: dict[str, float] = dict(program.info.get("numbers", {}))
        self.names = [port.name for port in program.inputs if port.kind == "number"]
        if not self.names:
            raise InputError(f"--numbers {path}: the program has no numbers: it is no training step, or its optimizer has none")
        rows, faults = _rows(path), list[str]()
        self.changes = [(self._step(row, line, faults), self._row_numbers(row, line, faults)) for line, row in enumerate(rows, 1)]
        steps = [step for step, _ in self.changes]
        faults += [f"row {line}: step {b} comes after step {a}" for line, (a, b) in enumerate(pairwise(steps), 2) if b <= a]
        if faults:
            shown = "\n    ".join(lines_of(faults, 6))
            raise InputError(f"--numbers {path} is no schedule of this program:\n    {shown}\n  it has the numbers {', '.join(self.names)}")
        self._check_guards(program)

    def at(self, step: int) -> dict[str, float]:
        """The numbers of a step, by name."""
        found = dict(self.saved)
        for begin, numbers in self.changes:
            if begin <= step:
                found |= numbers
        return found

    def _step(self, row: Mapping[str, object], line: int, faults: list[str]) -> int:
        step = row.get("step")
        if type(step) is int and step >= 0:
            return step
        faults.append(f'row {line} has no "step": the first step that it is for, counted from 0')
        return line

    def _row_numbers(self, row: Mapping[str, object], line: int, faults: list[str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, value in row.items():
            mine = [name] if name in self.names else [one for one in self.names if one.partition(".")[2] == name]
            values = value if isinstance(value, list) else [value] * len(mine)
            if name == "step":
                continue
            if not mine:
                faults.append(f"row {line}: {name} is no number of the program")
            elif len(values) != len(mine):
                faults.append(f"row {line}: {name} has {len(values)} values, and {len(mine)} groups have it")
            elif not all(isinstance(one, int | float) and not isinstance(one, bool) and isfinite(one) for one in values):
                faults.append(f"row {line}: {name} is {value!r}, no number")
            else:
                found |= {key: float(one) for key, one in zip(mine, values, strict=True)}
        return found

    def _check_guards(self, program: PlainProgram) -> None:
        """Raises StateError for a number on the other side of a compiled-in branch of Python code, the optimizer's or the model's (whose
        numbers have group -1)."""
        faults = []
        for group, number, relation, constant in program.info.get("guards", []):
            name = number if group < 0 else f"{group}.{number}"
            guard = NumberGuard(name, relation, constant)
            now = guard.outcome(self.saved)
            for step, _ in self.changes:
                if guard.outcome(self.at(step)) != now:
                    what = "another value than it was saved with" if relation == "is" else f"{number} {relation} {constant:g} is {not now}"
                    faults.append(f"from step {step}: {name} = {self.at(step)[name]:g}, where {what}")
        if faults:
            raise StateError(
                f"--numbers {self.path} asks for what the program was not compiled for:\n    " + "\n    ".join(lines_of(faults, 4)) + "\n"
                "  why: the code that reads this number branches on it, and one branch was compiled\n"
                "  what to do: save a second program with the number as it is from that step on, and go on with --state"
            )


def _rows(path: str | Path) -> Sequence[Mapping[str, object]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--numbers {path} cannot be read: {error}") from error
    try:
        whole = text.lstrip().startswith("[")
        rows = json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise InputError(f"--numbers {path} is no JSON, a row a line or a list of rows: {error}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f'--numbers {path} has no rows: each is like {{"step": 0, "lr": 0.001}}')
    found: Sequence[Mapping[str, object]] = rows
    return found
