"""Memory over a call, as SVG in a page: what is there for the whole call below, what the call makes above it, a budget as a line.

    |          .--peak
    |      .--'  '-.
    |__.--'         '----
    |xxxxxxxxxxxxxxxxxxxx      there for the whole call
     forward  backward  update
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

from meshc.report.markup import Markup, join, tag
from meshc.report.page import Memory
from meshc.report.tables import bytes_text

WIDTH, HEIGHT = 960, 240
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 26, 26
FAR: Final = 1.5
"""How many times what is held a budget may be to stand in the picture."""
LETTER: Final = 7.0
"""Pixels of a letter, on average."""


def memory_chart(memory: Memory) -> Markup:
    """Nothing where a call makes nothing."""
    if not memory.course or memory.total <= memory.kept:
        return Markup("")
    budget = memory.budget if memory.budget is not None and memory.budget <= FAR * memory.total else None
    top = 1.04 * max(memory.total, budget or 0)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = width / len(memory.course)

    def y(size: float) -> float:
        return TOP + height * (1 - size / top)

    outline = "".join(
        f"L{LEFT + at * step:.1f} {y(memory.kept + size):.1f}H{LEFT + (at + 1) * step:.1f}" for at, (size, _) in enumerate(memory.course)
    )
    base, right = y(memory.kept), LEFT + width
    parts = [*_phases(memory, step, height), tag("path", class_="made", d=f"M{LEFT} {base:.1f}{outline}V{base:.1f}Z")]
    parts.append(tag("rect", class_="kept", x=LEFT, y=f"{base:.1f}", width=f"{width:.1f}", height=f"{TOP + height - base:.1f}"))
    parts += [_mark(f"{y(size):.1f}", bytes_text(size), "tick") for size in _ticks(top)]
    if budget is not None:
        parts.append(tag("line", class_="budget", x1=LEFT, x2=right, y1=f"{y(budget):.1f}", y2=f"{y(budget):.1f}"))
        parts.append(tag("text", f"budget {bytes_text(budget)}", x=right - 4, y=f"{y(budget) - 4:.1f}", text_anchor="end"))
    at = LEFT + (memory.peak + 0.5) * step
    parts.append(tag("line", class_="peak", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=TOP, y2=TOP + height))
    side = ("start", 4) if at < LEFT + width / 2 else ("end", -4)
    parts.append(tag("text", f"peak {bytes_text(memory.total)}", x=f"{at + side[1]:.1f}", y=TOP - 8, text_anchor=side[0], class_="strong"))
    label = f"Memory over a call: {bytes_text(memory.total)} at the peak, of which {bytes_text(memory.kept)} are there for the whole call"
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="chart", role="img", aria_label=label)


def _phases(memory: Memory, step: float, height: float) -> list[Markup]:
    """A band for each phase, with its name where there is room."""
    found, at = [], 0
    for number, (phase, those) in enumerate(groupby(memory.course, key=lambda one: one[1])):
        count = len(list(those))
        x, width = LEFT + at * step, count * step
        band = tag("rect", x=f"{x:.1f}", y=TOP, width=f"{width:.1f}", height=f"{height:.1f}", class_=f"band{number % 2}")
        fits = width > LETTER * len(phase)
        name = tag("text", phase, x=f"{x + width / 2:.1f}", y=HEIGHT - 9, text_anchor="middle") if fits else ""
        found.append(join([band, name]))
        at += count
    return found


def _ticks(top: float) -> list[float]:
    """Three to six round numbers of bytes."""
    power = 10.0 ** (len(str(int(top))) - 1)
    step = next(step for step in (power / 5, power / 2, power, 2 * power) if top / step <= 6)
    return [step * count for count in range(int(top / step) + 1)]


def _mark(y: str, said: str, class_: str) -> Markup:
    return join([
        tag("line", class_=class_, x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y), tag("text", said, x=LEFT - 8, y=y, dy="0.32em", text_anchor="end"),
    ])  # fmt: skip
