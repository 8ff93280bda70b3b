"""Memory over a call as a chart of block characters, from the liveness in `meshc/cost/liveness.py`.

    429.1 kB budget |                  ┄▆┄
                    |        ▂▄▆████▆▄▂
                    |▂▄▆███████████████▃▃▃▃
    165.6 kB        |▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒      live for the whole call
                     forward─backward────upd
                                     ▲ peak

A column is the maximum of its part of the call; phases are named beneath where their names fit.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Final

from meshc.cost.liveness import Liveness
from meshc.report.tables import bytes_text

WIDTH: Final = 72
HEIGHT: Final = 8
BLOCKS: Final = " ▁▂▃▄▅▆▇█"
FOR_GOOD: Final = "▒"
SHORT: Final = {"forward": "fwd", "backward": "bwd", "update": "upd"}
FAR: Final = 1.5
"""Largest ratio of the budget to the peak at which the budget is drawn."""


def draw_memory(alive: Liveness, budget: int | None = None) -> list[str]:
    """Lines of the chart; none if a call computes no values. `budget`: bytes that a rank may hold."""
    course, kept = alive.course, sum(alive.holds.kept.values())
    if not course or not alive.holds.peak.total:
        return []
    parts = [course[len(course) * at // WIDTH : max(len(course) * (at + 1) // WIDTH, len(course) * at // WIDTH + 1)] for at in range(WIDTH)]
    columns = [kept + max(size for size, _ in part) for part in parts]
    phases = [Counter(phase for _, phase in part).most_common(1)[0][0] for part in parts]
    shown = budget if budget is not None and budget <= FAR * alive.holds.total else None
    top = max(alive.holds.total, shown or 0)
    labels = _labels(alive.holds.total, kept, shown, top)
    left = max(map(len, labels))
    rows = [f"{label:>{left}} │{_row(row, columns, kept, shown, top)}".rstrip() for row, label in enumerate(labels)]
    peak = next(at for at in range(WIDTH) if columns[at] == alive.holds.total)
    lines = [*rows, f"{'':{left}}  {''.join(_under(phases))}", f"{'':{left}}  {'':{peak}}▲"]
    return lines


def _level(size: int, top: int) -> int:
    """Height in eighths of a row, from below; at least 1 for a positive size."""
    return max(round(size / top * HEIGHT * 8), 1 if size else 0)


def _row(row: int, columns: list[int], kept: int, budget: int | None, top: int) -> str:
    """One row of the chart; `row` 0 is the highest."""
    floor = (HEIGHT - 1 - row) * 8
    dashes = budget is not None and row == _row_of(budget, top)
    cells = []
    for size in columns:
        filled = min(max(_level(size, top) - floor, 0), 8)
        for_good = filled == 8 and _level(kept, top) >= floor + 8
        cells.append(FOR_GOOD if for_good else "┄" if dashes and not filled else BLOCKS[filled])
    return "".join(cells)


def _row_of(size: int, top: int) -> int:
    return HEIGHT - 1 - min((_level(size, top) - 1) // 8, HEIGHT - 1)


def _labels(held: int, kept: int, budget: int | None, top: int) -> list[str]:
    """Labels beside the rows: bytes at the peak, bytes that are live for the whole call, and the budget."""
    labels = [""] * HEIGHT
    said = [(held, f"peak {bytes_text(held)}")]
    if budget is not None:
        said.insert(0, (budget, f"budget {bytes_text(budget)}"))
    if kept and _level(kept, top) >= 8:
        said.append((kept, f"{FOR_GOOD} whole call {bytes_text(kept)}"))
    for size, text in said:
        at = _row_of(size, top)
        at = at if not labels[at] else min(at + 1, HEIGHT - 1)
        labels[at] = labels[at] or text
    return labels


def _under(phases: list[str]) -> list[str]:
    """The line of phase names, each as wide as its phase."""
    return [f"{_phase_label(phase, width):─<{width}}" for phase, width in _runs(phases)]


def _phase_label(phase: str, width: int) -> str:
    """`forward`, `fwd` or `f`."""
    return phase if width > len(phase) else SHORT[phase] if width > len(SHORT[phase]) else phase[0]


def _runs(phases: list[str]) -> list[tuple[str, int]]:
    """Runs of equal phases with their widths; a run of one column is merged into the one before."""
    found: list[tuple[str, int]] = []
    for phase, same in groupby(phases):
        width = len(list(same))
        if found and (width == 1 or found[-1][0] == phase):
            found[-1] = found[-1][0], found[-1][1] + width
        else:
            found.append((phase, width))
    return found
