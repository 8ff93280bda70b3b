"""Renaming from the whole model to its captured layers, for names, plan lines and patterns: `layers.17.mlp` to `layers.1.mlp`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.phases.captured_depth import Depth
from meshc.plan.entries import OperatorPin, Pin, StoreLine
from meshc.plan.precision_lines import ProductLine

Line = TypeVar("Line", bound=Pin | StoreLine | OperatorPin | ProductLine)


def captured_name(name: str, depth: Depth | None) -> str:
    """The name, with layer numbers as among the captured layers."""
    for path in depth.captured if depth is not None else ():
        found = re.match(rf"{re.escape(path)}\.(\d+)(?=[./]|$)", name)
        if found is not None:
            assert depth is not None
            standing = (number for number, whole in enumerate(_whole_numbers(path, depth)) if found[1] in whole)
            return f"{path}.{next(standing, found[1])}{name[found.end() :]}"
    return name


def captured_lines(lines: Sequence[Line], depth: Depth | None) -> tuple[Line, ...]:
    """A plan's lines, which number layers as in the whole model, for the captured layers that stand for them."""
    if depth is None:
        return tuple(lines)
    return tuple(replace(line, pattern=one) for line in lines for one in captured_patterns(line.pattern, depth))


def captured_patterns(pattern: str, depth: Depth) -> tuple[str, ...]:
    """For a pattern that names a list and numbers in it, one pattern for each captured layer that it means; any other unchanged."""
    for path in depth.captured:
        found = re.match(rf"(?:value:)?{re.escape(path)}\.([\d?\[\]!-]+)(?=[./]|$)", pattern)
        if found is not None:
            front, behind = pattern[: found.start(1)], pattern[found.end() :]
            whole = _whole_numbers(path, depth)
            named = [number for number, numbers in enumerate(whole) if any(fnmatchcase(one, found[1]) for one in numbers)]
            return tuple(f"{front}{number}{behind}" for number in named) or (pattern,)
    return (pattern,)


def _whole_numbers(path: str, depth: Depth) -> list[list[str]]:
    """Per captured layer of a list, the numbers of the layers that it stands for."""
    names = [whole_names(depth, f"{path}.{number}") for number in range(len(depth.captured[path]))]
    return [[name.removeprefix(f"{path}.") for name in each] for each in names]
