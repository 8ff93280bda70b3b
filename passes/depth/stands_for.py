"""Which captured layer stands for a layer of the whole model: `layers.17.mlp` is `layers.1.mlp` of the four that are captured."""

from __future__ import annotations

from bisect import bisect_right

from meshc.passes.phases.depth import Depth


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
