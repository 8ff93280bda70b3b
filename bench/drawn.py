"""A drawing in text: points over two axes, and panels side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 50, 12


class Mark(NamedTuple):
    x: float
    y: float
    sign: str


def panel(marks: Sequence[Mark], title: str, across: str, up: str, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Lines of equal length. Where two points fall on one place, the later one's sign stands there."""
    (left, right), (low, high) = (_ends([mark[axis] for mark in marks]) for axis in (0, 1))
    cells = [[" "] * width for _ in range(height)]
    for mark in marks:
        column = round((mark.x - left) / (right - left) * (width - 1))
        row = height - 1 - round((mark.y - low) / (high - low) * (height - 1))
        cells[row][column] = mark.sign
    said = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{said.get(number, ''):>5} │{''.join(row)}" for number, row in enumerate(cells)]
    ends = f"{left:.0f}".ljust(width - len(f"{right:.0f} {across}")) + f"{right:.0f} {across}"
    lines = [f"{up:>5}  {title}", *lines, f"{'':>5} └{'─' * width}", f"{'':>5}  {ends}"]
    wide = max(map(len, lines))
    return [line.ljust(wide) for line in lines]


def beside(panels: Sequence[Sequence[str]]) -> str:
    return "\n".join("   ".join(parts).rstrip() for parts in zip(*panels, strict=True))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """With a little room on both sides."""
    low, high = min(values), max(values)
    room = 0.03 * (high - low) or 1.0
    return low - room, high + room
