"""Drawings of a timeline: SVG with a row for each rank, or a few lines of text; and their files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from meshc.errors import PlanError
from meshc.files.folders import write_text
from meshc.pipelining import perfetto_trace
from meshc.pipelining.events import StageRun
from meshc.pipelining.schedule import OPS, Action
from meshc.pipelining.timing import Event, Timeline

COLOURS: Final = {"F": (106, 165, 227), "B": (99, 181, 106), "I": (240, 176, 79), "W": (196, 146, 224), "run": (190, 190, 190)}
"""Red, green and blue of an op in a rank's first stage, and of stages outside a pipeline; paler in the rank's other stages."""

_ROW, _GAP, _LEFT, _RIGHT, _TOP, _BOX = 26, 6, 64, 170, 58, 18
"""Pixels: height of a row, space below a row, margins, width of an action at the first quartile of durations."""
_WIDEST = 6000
_LETTER = 6.6
"""Average pixels of a letter in the legend."""
_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def svg(timeline: Timeline) -> str:
    """The timeline as SVG: rows are ranks, boxes are actions with their microbatch; hovering shows the action and its times.

    Several pipelines are drawn one below the other, each in the order of its stages' ranks.
    Stages outside a schedule (before the first microbatch, after the last one) are grey, with their names.
    """
    events = [event for events in timeline.stage_events for event in events]
    first_s = min((event.start_s for event in events), default=0.0)
    lengths = sorted(event.end_s - event.start_s for events in timeline.action_events if events for event in events) or sorted(
        event.end_s - event.start_s for event in events
    )
    short_s = lengths[len(lengths) // 4] if lengths else 1.0
    scale = min(_BOX / short_s if short_s > 0 else math.inf, _WIDEST / (timeline.call_s or 1.0))
    width = timeline.call_s * scale
    unit_s, unit = next(((s, name) for s, name in _UNITS if timeline.call_s >= s), _UNITS[-1])
    bottom = _TOP + timeline.ranks * (_ROW + _GAP)
    shades, places = _shades(timeline), _places(timeline)
    legend = list(_legend(timeline, shades))
    total = max(_LEFT + width + _RIGHT, 640.0, legend[-1][0] if legend else 0.0)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" height="{bottom + 44}" viewBox="0 0 {total:.0f} {bottom + 44}" '
        'font-family="DejaVu Sans, Helvetica, sans-serif" font-size="11">',
        f'<rect width="{total:.0f}" height="{bottom + 44}" fill="white"/>',
        f'<text x="{_LEFT}" y="18"><tspan font-size="14" font-weight="bold">{escape(timeline.name or "pipeline")}</tspan>'
        f'<tspan dx="16">{_headline(timeline, unit_s, unit)}</tspan></text>',
        *(line for _, line in legend),
        *_rows(timeline, width),
        *(_box(event, places[event.rank], shades, first_s, scale, unit_s, unit) for event in events),
        *_axis(timeline.call_s, scale, bottom, unit_s, unit),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _headline(timeline: Timeline, unit_s: float, unit: str) -> str:
    """Text of the makespan, and of the whole call's time where that is longer."""
    whole = f"{timeline.call_s / unit_s:.4g} {unit}"
    if not any(timeline.action_events):
        return whole
    idle = f"{timeline.makespan_s / unit_s:.4g} {unit}, idle {100 * timeline.bubble:.1f} %"
    return idle if timeline.call_s <= timeline.makespan_s else f"a call {whole}, its microbatches {idle}"


def _legend(timeline: Timeline, shades: Mapping[tuple[int, int], int]) -> Iterator[tuple[float, str]]:
    """(x of the right end, SVG) of each entry of the legend."""
    used = {_colour_key(event) for events in timeline.stage_events for event in events}
    outside = "before and after the microbatches" if any(timeline.action_events) else "stage"
    x = float(_LEFT)
    for op, words in ((op, {**OPS, "run": outside}[op]) for op in COLOURS if op in used):
        label = f"{words} ({op})" if op in OPS else words
        box = f'<rect x="{x:.0f}" y="30" width="14" height="14" fill="{_fill(op, 0)}" stroke="#444" stroke-width="0.5"/>'
        text = f'<text x="{x + 19:.0f}" y="41">{label}</text>'
        x += 37 + _LETTER * len(label)
        yield x, box + text
    if any(shades.values()):
        words = "paler: later stages of the rank"
        yield x + _LETTER * len(words), f'<text x="{x:.0f}" y="41">{words}</text>'


def _action(event: Event) -> Action:
    assert isinstance(event.instruction, Action), "one of `action_events`"
    return event.instruction


def _colour_key(event: Event) -> str:
    return event.instruction.op if isinstance(event.instruction, Action) else "run"


def _rows(timeline: Timeline, width: float) -> Iterator[str]:
    peaks = timeline.peaks()
    for rank, place in _places(timeline).items():
        y = _TOP + place * (_ROW + _GAP)
        yield f'<text x="{_LEFT - 8}" y="{y + 17}" text-anchor="end">rank {rank}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{width:.2f}" height="{_ROW}" fill="#eee"/>'
        idle = timeline.idle_s[rank] / timeline.makespan_s if timeline.makespan_s else 0.0
        if timeline.action_events[rank] or not timeline.stage_events[rank]:
            yield f'<text x="{_LEFT + width + 8:.2f}" y="{y + 17}">idle {100 * idle:.1f} %, holds up to {peaks[rank]:g}</text>'


def _places(timeline: Timeline) -> Mapping[int, int]:
    """Rank -> its row, counted from the top."""
    ranks = [rank for pipeline in timeline.pipelines for rank in pipeline] or range(timeline.ranks)
    return {rank: place for place, rank in enumerate(ranks)}


def _shades(timeline: Timeline) -> Mapping[tuple[int, int], int]:
    """(rank, stage) -> index of the stage among the rank's stages, counted from 0."""
    stages = [sorted({_action(event).stage for event in events}) for events in timeline.action_events]
    return {(rank, stage): shade for rank, mine in enumerate(stages) for shade, stage in enumerate(mine)}


def _fill(op: str, shade: int) -> str:
    keep = 0.55**shade
    return "#" + "".join(f"{round(255 - (255 - part) * keep):02x}" for part in COLOURS[op])


def _box(event: Event, place: int, shades: Mapping[tuple[int, int], int], first_s: float, scale: float, unit_s: float, unit: str) -> str:
    item = event.instruction
    x, width = _LEFT + (event.start_s - first_s) * scale, (event.end_s - event.start_s) * scale
    y = _TOP + place * (_ROW + _GAP)
    shade = shades[event.rank, item.stage] if isinstance(item, Action) else 0
    label = str(item.microbatch) if isinstance(item, Action) else _stage_label(item) if isinstance(item, StageRun) else ""
    size = min(11.0, (width - 2) / (0.64 * len(label)))
    fits = size >= (5 if isinstance(item, Action) else 8)
    text = f'<text x="{x + width / 2:.2f}" y="{y + 17}" text-anchor="middle" font-size="{size:.1f}">{escape(label)}</text>' if fits else ""
    times = f"{(event.start_s - first_s) / unit_s:.4g} to {(event.end_s - first_s) / unit_s:.4g} {unit}"
    name = str(item).removeprefix("RUN:").removesuffix(".0") if isinstance(item, StageRun) else str(item)
    return (
        f'<g><title>{escape(name)} on rank {event.rank}, {times}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" '
        f'fill="{_fill(_colour_key(event), shade)}" stroke="#444" stroke-width="0.5"/>{text}</g>'
    )


def _stage_label(run: StageRun) -> str:
    """`before` for `before_0`, since the row shows the rank; the microbatch's number for the stage `each`."""
    return str(run.microbatch) if run.stage == "each" else run.stage.rstrip("0123456789").removesuffix("_")


def _axis(makespan_s: float, scale: float, bottom: int, unit_s: float, unit: str) -> Iterator[str]:
    yield f'<line x1="{_LEFT}" y1="{bottom + 4}" x2="{_LEFT + makespan_s * scale:.2f}" y2="{bottom + 4}" stroke="#444"/>'
    if makespan_s <= 0:
        return
    rough = 80 / scale  # seconds between ticks that are 80 pixels apart, rounded up to 1, 2 or 5 of a power of ten
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough * (1 - 1e-9))
    for count in range(int(makespan_s / step * (1 + 1e-9)) + 1):
        x = _LEFT + count * step * scale
        yield f'<line x1="{x:.2f}" y1="{bottom + 4}" x2="{x:.2f}" y2="{bottom + 9}" stroke="#444"/>'
        yield f'<text x="{x:.2f}" y="{bottom + 22}" text-anchor="middle">{count * step / unit_s:.6g} {unit}</text>'


def text(timeline: Timeline, unit_s: float = 1.0) -> str:
    """The timeline as text: a line for each rank, three columns for each `unit_s` seconds; later stages of a rank in lower case."""
    lines = []
    shades = _shades(timeline)
    start_s = min((event.start_s for events in timeline.action_events for event in events), default=0.0)
    for rank, events in enumerate(timeline.action_events):
        line = f"{rank}  "
        for event in events:
            label = f"{_action(event).op}{_action(event).microbatch}"
            column = 3 + 3 * round((event.start_s - start_s) / unit_s)
            line = line.ljust(column) + (label.lower() if shades[rank, _action(event).stage] else label)
        lines.append(line.rstrip())
    return "\n".join(lines)


def write(timeline: Timeline, path: str | Path) -> None:
    """Writes an SVG for a path that ends in .svg, a Perfetto trace for one that ends in .json, and both into a folder.

    Raises PlanError for another ending, FileError if the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in ("", ".svg", ".json") and not path.is_dir():
        raise PlanError(f"{path}: a timeline is written as .svg or .json, or as both into a folder (a path without an ending)")
    single = path.suffix in (".svg", ".json") and not path.is_dir()
    files = [path] if single else [path / "timeline.svg", path / "timeline.json"]
    for file in files:
        write_text(file, svg(timeline) if file.suffix == ".svg" else perfetto_trace.timeline_to_trace(timeline))
