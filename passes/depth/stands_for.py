"""Which captured layer stands for a layer of the whole model: `layers.17.mlp` is `layers.1.mlp` of the four that are captured."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from meshc.passes.depth.standing import whole_names
from meshc.passes.phases.depth import Depth
from meshc.plan.entries import OperatorPin, Pin, StoreLine

Line = TypeVar("Line", bound=Pin | StoreLine | OperatorPin)


def captured_name(name: str, depth: Depth | None) -> str:
    """The name, with the layers' numbers as they are among those captured."""
    for path, kept in (depth.captured if depth is not None else {}).items():
        if not name.startswith(f"{path}."):
            continue
        number, dot, rest = name.removeprefix(f"{path}.").partition(".")
        if number.isdecimal():
            assert depth is not None
            return f"{path}.{_captured(path, int(number), kept, depth)}{dot}{rest}"
    return name


def _captured(path: str, number: int, kept: tuple[int, ...], depth: Depth) -> int:
    before = bisect_right(kept, number) - 1
    if before >= 0 and kept[before] == number:
        return before
    for stretch in depth.stretches:
        inside = stretch.first + stretch.period  # the second block, which stands for those that are left out
        if stretch.path == path and stretch.first <= before < stretch.first + 4 * stretch.period:
            return inside + (number - kept[inside]) % stretch.period
    return number


def captured_lines(lines: Sequence[Line], depth: Depth | None) -> tuple[Line, ...]:
    """A plan's lines, which name layers by their numbers in the whole model, about those that stand for them."""
    if depth is None:
        return tuple(lines)
    return tuple(replace(line, pattern=one) for line in lines for one in captured_patterns(line.pattern, depth))


def captured_patterns(pattern: str, depth: Depth) -> tuple[str, ...]:
    """Of a pattern that names a list and some numbers in it, one for each captured layer that it means; any other as it is."""
    for path, kept in depth.captured.items():
        found = re.match(rf"(?:value:)?{re.escape(path)}\.([\d?\[\]!-]+)(?=[./]|$)", pattern)
        if found is not None:
            front, behind = pattern[: found.start(1)], pattern[found.end() :]
            whole = [[name.removeprefix(f"{path}.") for name in whole_names(depth, f"{path}.{number}")] for number in range(len(kept))]
            named = [number for number, numbers in enumerate(whole) if any(fnmatchcase(one, found[1]) for one in numbers)]
            return tuple(f"{front}{number}{behind}" for number in named) or (pattern,)
    return (pattern,)
