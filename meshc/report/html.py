"""Rendering of a report as one self-contained page of HTML, with charts of memory and time, and of its head for notebooks.

The page asks for nothing of the network; its styles and its one script are in it, and its own policy lets no other script run. All data
comes from `meshc/report/page.py`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from meshc.errors import PlanError
from meshc.files.folders import write_text
from meshc.report.markup import Markup, join, table, tag, text
from meshc.report.memory_report import LARGEST_HEADERS, shown_budget
from meshc.report.page import Head, Memory, Page
from meshc.report.spans import TimeSpan
from meshc.report.tables import bytes_text, seconds_text
from meshc.report.tree import GIVES, Branch, Leaf, Lies

STYLE: Final = Path(__file__).with_name("page.css")
SCRIPT: Final = Path(__file__).with_name("page.js")
COLOURS: Final = 8
"""Number of axis colours; the ninth axis repeats the first."""
BREAK: Final = tag("br")
SEARCHED: Final = "not kept in a saved program: program.report() has it, where the plan was searched"


def write(page: Page, path: str | Path) -> None:
    """Writes the page. Raises PlanError if the path does not end in .html, FileError if it cannot be written."""
    if Path(path).suffix not in (".html", ".htm") or Path(path).is_dir():
        raise PlanError(f"{path}: a report is one file, whose name ends in .html")
    write_text(path, html(page))


def html(page: Page) -> str:
    """The page as HTML."""
    style, script = STYLE.read_text(), SCRIPT.read_text()
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{hashed}'"
    colours = _Colours([axis.name for axis in page.axes])
    made = [section(page, colours) for section in SECTIONS]
    shown = [(name, title, body) for name, title, body in made if body]
    head = tag(
        "head", tag("meta", charset="utf-8"), Markup(f'<meta http-equiv="Content-Security-Policy" content="{text(policy)}">'),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"), tag("title", f"{page.head.name}: meshc report"),
        tag("style", Markup(style)),
    )  # fmt: skip
    links = tag("nav", *(tag("a", title, href=f"#{name}") for name, title, _ in shown))
    box = tag("label", "find ", tag("input", id="find", type="search", placeholder="a parameter, module, operator, axis"), for_="find")
    top = tag("header", tag("strong", page.head.name), links, box, tag("output", id="found", for_="find"))
    sections = [tag("section", tag("h2", title), body, id=name) for name, title, body in shown]
    main = tag("main", tag("h1", page.head.name), _legend(page, colours), *sections)
    return f'<!doctype html>\n<html lang="en">{head}{tag("body", top, main, tag("script", Markup(script)))}</html>\n'


def head_html(head: Head) -> str:
    """A notebook's view of a program: its name, mesh, plan, bytes that a rank holds, and seconds of a call."""
    return _card(head.name, _facts(head))


def asked_html(name: str, mesh: str, plan: str) -> str:
    """A notebook's view of a program that is not compiled yet."""
    facts = [("what", "nothing is compiled yet: call it, or give example inputs to meshc.compile"), ("mesh", mesh)]
    return _card(name, [*facts, ("plan", join((tag("code", line) for line in plan.splitlines()), BREAK))])


def _card(name: str, facts: Iterable[tuple[str, object]]) -> str:
    left = "text-align:left;vertical-align:top"
    rows = (tag("tr", tag("th", what, style=left), tag("td", said, style=left)) for what, said in facts)
    return tag("div", tag("strong", name), tag("table", tag("tbody", *rows)))


class _Colours:
    """CSS classes of axes, by their position in the mesh."""

    def __init__(self, axes: Sequence[str]) -> None:
        self.of = {axis: f"axis a{at % COLOURS}" for at, axis in enumerate(axes)}

    def axis(self, name: str) -> Markup:
        return tag("span", name, class_=self.of.get(name.partition("~")[0], "axis"))

    def axes(self, names: Sequence[str]) -> Markup:
        return join(map(self.axis, names), " ")

    def lies(self, lies: Lies, partial: Sequence[str] = ()) -> Markup:
        """`[batch 8/dp, hidden 256]`, and the axes over which the value is partial."""
        dims = [join([join([name, *(join(["/", self.axis(axis)]) for axis in axes)]) for name, axes in dim], " * ") for dim in lies]
        waits = join([" partial ", self.axes(partial)]) if partial else ""
        return tag("span", "[", join(dims, ", "), "]", waits, class_="lies")


def _facts(head: Head) -> Iterator[tuple[str, object]]:
    more = [f"{head.microbatches} microbatches"] if head.microbatches > 1 else []
    more += [f"compiled regions ({head.backend})"] if head.backend != "eager" else []
    yield "what", ", ".join([f"{head.what} for {head.ranks} rank{'s' * (head.ranks > 1)}", *more])
    yield "mesh", head.mesh
    yield "plan", join((tag("code", line) for line, _ in head.plan), BREAK)
    budget = f", of a budget of {bytes_text(head.budget)}" if head.budget is not None else ""
    yield "a rank holds", f"{bytes_text(head.holds)} at the peak{budget}"
    yield "a call takes", f"{seconds_text(head.step_s)}, predicted for {head.device}"


def _legend(page: Page, colours: _Colours) -> Markup:
    shown = [join([colours.axis(one.name), f" {one.size} rank{'s' * (one.size > 1)}"]) for one in page.axes]
    return tag("p", "axes: ", join(shown, ", "), class_="legend")


# --------------------------------------------------------------------------------------------------------------------------- sections

Section = tuple[str, str, Markup]


def _plan(page: Page, colours: _Colours) -> Section:
    head = page.head
    facts = table(["", ""], [row for row in _facts(head) if row[0] != "plan"], class_="facts")
    lines = [(tag("code", line), who) for line, who in head.plan]
    parts = [facts, tag("h3", "the plan, and who said so"), table(["line", "said by"], lines)]
    parts += [tag("h3", "notes"), tag("ul", *(tag("li", note) for note in page.notes))] if page.notes else []
    for title, grid in (("weighed for the plan", page.weighed), ("tried for the stages", page.tried)):
        if grid is not None and grid.rows:
            parts += [tag("h3", title), table(grid.headers, grid.rows)]
    parts += [tag("p", f"what a search has weighed: {SEARCHED}", class_="dim")] if page.weighed is None else []
    return "plan", "plan", join(parts)


def _axes(page: Page, colours: _Colours) -> Section:
    rows = [
        (colours.axis(one.name), one.size, tag("code", one.splits), one.source, _percent(one.share), _percent(one.could),
         "" if one.times is None else f"{one.times:.3g} x", bytes_text(one.spared), one.sends, bytes_text(one.bytes),
         seconds_text(one.seconds))
        for one in page.axes
    ]  # fmt: skip
    headers = ["axis", "ranks", "splits", "said by", "of the arithmetic", "of what it could", "without it", "spares a rank", "messages",
               "bytes/rank", "take"]  # fmt: skip
    told = (
        "Saved: without the axis a rank would do so many times the arithmetic (matrix products, convolutions, attention), and hold so much "
        "more for the whole call (parameters, state, buffers, inputs). Paid: collectives of a call over it, alone or with other axes, and "
        "messages between stages, with the seconds that they take by themselves; much of that may hide behind computing."
    )
    return "axes", "what each axis saves and costs", join([tag("p", told, class_="dim"), table(headers, rows, (1, 4, 5, 6, 7, 8, 9, 10))])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _time(page: Page, colours: _Colours) -> Section:
    whole = max(sum(page.times.values()), page.head.step_s, 1e-30)
    rows: list[Sequence[object]] = [(name, seconds_text(one), _bar(one / whole)) for name, one in page.times.items()]
    if page.hidden_s > 0:
        rows.append(("hidden behind computing", f"- {seconds_text(page.hidden_s)}", _bar(page.hidden_s / whole, "bar less")))
    rows.append((tag("strong", "a call"), tag("strong", seconds_text(page.head.step_s)), _bar(page.head.step_s / whole, "bar sum")))
    parts = [table(["", "takes", ""], rows, (1,), class_="bars"), tag("p", f"{page.head.device}: {page.head.device_source}", class_="dim")]
    if page.stages.rows:
        parts += [tag("h3", "stages"), table(page.stages.headers, page.stages.rows, (0, 1, 3, 4, 5, 6))]
    parts.append(tag("h3", "timeline"))
    if page.spans:
        told = "all ranks alike; waits: nothing is computed until messages have come, or messages beside it slow it down"
        parts += [time_chart(page.spans), tag("p", told, class_="dim")]
    else:
        picture = page.timeline.replace(' xmlns="http://www.w3.org/2000/svg"', "")
        parts.append(tag("div", Markup(picture), class_="wide timeline"))
    return "time", "time of a call", join(parts)


def _bar(share: float, class_: str = "bar") -> Markup:
    return tag("span", tag("span", style=f"width:{100 * min(max(share, 0.0), 1.0):.1f}%"), class_=class_)


def _collectives(page: Page, colours: _Colours) -> Section:
    if not page.traffic:
        return "collectives", "collectives", tag("p", "none: ranks do not communicate")
    rows = [(colours.axes(one.axes), one.phase, one.kind, one.times, bytes_text(one.bytes), seconds_text(one.seconds), one.reason)
            for one in page.traffic]  # fmt: skip
    largest = [
        (one.kind, colours.axes(one.axes), one.phase, one.times, bytes_text(one.bytes), seconds_text(one.seconds), one.reason,
         join([tag("span", one.line.rsplit("/", 1)[-1], title=one.line), BREAK if one.code else "", tag("code", one.code)]))
        for one in page.largest
    ]  # fmt: skip
    of = "of one call" if not page.stages.rows else "of one call, of all stages together"
    parts = [
        tag("p", f"{of}; bytes of the operand, of the result for all_gather, what moves for halo and zigzag", class_="dim"),
        table(["axes", "phase", "collective", "count", "bytes/rank", "take", "mostly for"], rows, (3, 4, 5)),
        tag("h3", "those that take longest, equal layers as one"),
        table(["collective", "axes", "phase", "count", "bytes of each", "take", "why", "line of the model"], largest, (3, 4, 5)),
    ]
    if page.copies.rows:
        parts += [tag("h3", "copies between device and host"), table(page.copies.headers, page.copies.rows, (2, 3, 4))]
    return "collectives", "collectives", join(parts)


def _memory(page: Page, colours: _Colours) -> Section:
    found = page.memory
    kinds: list[Sequence[object]] = [(name, bytes_text(size), _bar(size / max(found.total, 1))) for name, size in found.kinds]
    kinds.append((tag("strong", "together"), tag("strong", bytes_text(found.total)), ""))
    parts = [tag("p", f"of {found.whose}; predicted" + (f"; peak at {found.at}" if found.at else ""), class_="dim"), memory_chart(found)]
    parts.append(table(["", "bytes/rank", ""], kinds, (1,), class_="bars"))
    if found.largest:
        parts += [tag("h3", "the largest values at the peak, equal layers as one")]
        parts += [table(LARGEST_HEADERS, found.largest, (0, 1), class_="largest")]
        parts += [tag("p", f"and {found.further}", class_="dim")] if found.further else []
    return "memory", "memory over a call", join(parts)


def _model(page: Page, colours: _Colours) -> Section:
    headers = ["module, parameter", "", "dtype", "lies", "gradient, state", "bytes/rank", "state/rank"]
    told = "Sizes are global; equal layers stand once. `makes` is the last value of forward that a module's own lines make."
    tree = table(headers, _rows(page.tree, colours, page.head.name, "", 0), (5, 6), class_="tree")
    return "model", "model", join([tag("p", told, class_="dim"), tree])


def _rows(branch: Branch, colours: _Colours, name: str, path: str, depth: int) -> Iterator[Markup]:
    button = tag("button", "▾", type="button", aria_expanded="true", aria_label=f"fold {name}")
    count = tag("span", f" {branch.count} alike", class_="dim") if branch.count > 1 else ""
    indent = f"padding-left:{depth * 1.1:.1f}rem"
    cells = [tag("td", button, name, count, style=indent), *[tag("td", "") for _ in range(4)]]
    size = bytes_text(branch.bytes) + (f" x {branch.count}" if branch.count > 1 else "") if branch.bytes else ""
    yield tag("tr", *cells, tag("td", size, class_="n"), tag("td", ""), class_="branch", data_depth=depth, data_find=path.lower())
    for leaf in branch.leaves:
        yield _leaf(leaf, colours, path, depth + 1)
    for child in branch.children:
        word = child.name if child.count == 1 else "*"
        yield from _rows(child, colours, child.name, f"{path}.{word}".removeprefix("."), depth + 1)


def _leaf(leaf: Leaf, colours: _Colours, path: str, depth: int) -> Markup:
    gives = leaf.kind == GIVES
    others = [f"{kind} {said}" for kind, said in (("gradient", leaf.gradient), ("state", leaf.state), ("", leaf.where)) if said]
    cells = [
        tag("td", "makes" if gives else leaf.name, style=f"padding-left:{depth * 1.1 + 1.4:.1f}rem"), tag("td", "" if gives else leaf.kind),
        tag("td", leaf.dtype), tag("td", colours.lies(leaf.lies, leaf.partial)), tag("td", "; ".join(others)),
        tag("td", bytes_text(leaf.bytes), class_="n"), tag("td", bytes_text(leaf.state_bytes) if leaf.state_bytes else "", class_="n"),
    ]  # fmt: skip
    name = path if gives else f"{path}.{leaf.name}".removeprefix(".")
    return tag("tr", *cells, class_="gives" if gives else "leaf", data_depth=depth, data_find=f"{name} {_axis_words(leaf.lies)}".lower())


def _axis_words(lies: Lies) -> str:
    return " ".join(sorted({axis for dim in lies for _, over in dim for axis in over}))


def _values(page: Page, colours: _Colours) -> Section:
    headers = ["value", "phase", "operator", "module", "line", "lies", "bytes/rank", "count", "why"]
    rows = []
    for one, count in page.values:
        find = f"{one.name} {one.phase} {one.operator} {one.module} {one.line} {_axis_words(one.lies)}".lower()
        cells = [
            tag("td", tag("code", one.name)), tag("td", one.phase), tag("td", one.operator), tag("td", one.module), tag("td", one.line),
            tag("td", f"{one.dtype} ", colours.lies(one.lies, one.partial)), tag("td", bytes_text(one.bytes), class_="n"),
            tag("td", count, class_="n"), tag("td", one.reason, class_="why"),
        ]  # fmt: skip
        rows.append(tag("tr", *cells, data_find=find))
    more = tag("p", f"and {page.further_values} smaller ones: print(program) has all", class_="dim") if page.further_values else ""
    told = f"{len(page.values)} values that operators and collectives make, equal ones once, the largest first"
    return "values", "values", tag("details", tag("summary", told), table(headers, rows, (6, 7)), more, id="all-values")


SECTIONS: Final = (_plan, _axes, _time, _memory, _collectives, _model, _values)


# SVG charts of a call: memory over time (with the budget as a line), and compute and wait times of a rank.
#
# |          .--peak
# |      .--'  '-.
# |__.--'         '----
# |xxxxxxxxxxxxxxxxxxxx      live for the whole call
#  forward  backward  update


WIDTH, HEIGHT = 960, 240
LEFT, RIGHT, TOP, BOTTOM = 76, 12, 26, 26
LETTER: Final = 7.0
"""Mean width of a letter in pixels."""


def memory_chart(memory: Memory) -> Markup:
    """The memory chart; empty if a call computes no values."""
    if not memory.course or memory.total <= memory.kept:
        return Markup("")
    budget = shown_budget(memory.budget, memory.total)
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
    return _chart(parts, HEIGHT, label)


def _chart(parts: Iterable[Markup], height: int, label: str) -> Markup:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height}", class_="chart", role="img", aria_label=label)


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
    return _chart([*parts, *ticks, legend], 2 * row + 46, label)
