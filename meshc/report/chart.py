"""SVG charts of a call: memory over time (with the budget as a line), and compute and wait times of a rank.

    |          .--peak
    |      .--'  '-.
    |__.--'         '----
    |xxxxxxxxxxxxxxxxxxxx      live for the whole call
     forward  backward  update
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from meshc.report.markup import Markup, join, tag
from meshc.report.page import Memory
from meshc.report.spans import TimeSpan
from meshc.report.tables import bytes_text, seconds_text

WIDTH, HEIGHT = 960, 240
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 26, 26
FAR: Final = 1.5
"""Largest ratio of the budget to the peak at which the budget is drawn."""
LETTER: Final = 7.0
"""Mean width of a letter in pixels."""


def memory_chart(memory: Memory) -> Markup:
    """The memory chart; empty if a call computes no values."""
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
    """A band for each phase, with its name if that fits."""
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
    line = tag("line", class_=class_, x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y)
    return join([line, tag("text", said, x=LEFT - 8, y=y, dy="0.32em", text_anchor="end")])


def time_chart(spans: Sequence[TimeSpan]) -> Markup:
    """Two rows: a rank's compute times, by phase, and its wait times. Tooltips give the phase, start and end."""
    last = max(one.end_s for one in spans)
    scale, row = (WIDTH - LEFT - RIGHT) / last, 28
    parts = [tag("text", name, x=LEFT - 8, y=row * at + 18, text_anchor="end") for at, name in enumerate(("computes", "waits"))]
    for one in spans:
        title = tag("title", f"{one.phase}{' waits' * one.waits}, {seconds_text(one.start_s)} to {seconds_text(one.end_s)}")
        x, width = f"{LEFT + one.start_s * scale:.2f}", f"{(one.end_s - one.start_s) * scale:.2f}"
        box = tag("rect", x=x, y=row * one.waits + 2, width=width, height=row - 6, class_="waits" if one.waits else f"span {one.phase}")
        parts.append(tag("g", title, box))
    for phase in dict.fromkeys(one.phase for one in spans):
        longest = max((one for one in spans if one.phase == phase), key=lambda one: one.end_s - one.start_s)
        at = LEFT + (longest.start_s + longest.end_s) / 2 * scale
        if (longest.end_s - longest.start_s) * scale > LETTER * len(phase) and not longest.waits:
            parts.append(tag("text", phase, x=f"{at:.1f}", y=18, text_anchor="middle", class_="on"))
    ticks = [tag("text", seconds_text(last * at / 5), x=f"{LEFT + last * at / 5 * scale:.1f}", y=2 * row + 16,
                 text_anchor="end" if at == 5 else "middle") for at in range(6)]  # fmt: skip
    seen = dict.fromkeys(one.phase for one in spans if not one.waits)
    label = f"A call of {seconds_text(last)}: {', '.join(seen)}"
    keys = [tag("tspan", f"■ {phase}  ", class_=phase) for phase in seen]
    legend = tag("text", *keys, x=LEFT, y=2 * row + 38)
    return tag("svg", *parts, *ticks, legend, viewBox=f"0 0 {WIDTH} {2 * row + 46}", class_="chart", role="img", aria_label=label)
