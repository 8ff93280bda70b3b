"""Memory report of a rank as text: bytes by kind, a chart of bytes over the call, and the largest values at the peak."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from meshc import ir
from meshc.cost import peak_memory
from meshc.cost.divided_work import collapse_layers
from meshc.cost.liveness import BESIDE, ExecutedNode, Liveness, Value, peak_liveness
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, placement, share_text, table

LARGEST: Final = 10
NAMES: Final = {
    "parameter": "parameters", "state": "optimizer state", peak_memory.COPY: "copies in torch's layout", "buffer": "buffers",
    "constant": "constants", "input": "inputs",
}  # fmt: skip
"""Printed name of each kind of port whose values are live for the whole call."""
LARGEST_HEADERS: Final = ["bytes/rank", "count", "value", "made by", "at", "read last by"]


def bytes_by_kind(most: peak_memory.RankBytes) -> dict[str, int]:
    """Bytes of a rank's device at the peak, by the printed names of their kinds."""
    found = {text: most.kept[kind] for kind, text in NAMES.items() if most.kept.get(kind)}
    if most.peak.gradients:
        found["gradients, at the peak"] = most.peak.gradients
    if most.peak.total:
        found["activations, at the peak"] = most.peak.total - most.peak.gradients
    return found


def rank_text(program: PlainProgram, most: peak_memory.RankBytes) -> str:
    """Whose memory is reported."""
    return "a rank" if program.pipeline is None else f"rank {most.rank} of {program.pipeline.axis}, which needs most"


def memory_table(program: PlainProgram, budget: int | None = None) -> str:
    """The memory report as text. `budget`: bytes that a rank may hold; None if the user has set no limit."""
    ranks = peak_memory.by_rank(program)
    most = max(ranks, key=lambda one: one.total)
    found = peak_liveness(program, holds=most)
    of = "" if program.pipeline is None else f", rank {most.rank} of {program.pipeline.axis}"
    lines = [_by_kind(program, ranks, most, budget)]
    if drawing := draw_memory(found, budget):
        lines += ["", f"memory over a call{of}", *(f"  {line}" for line in drawing)]
    if found.values:
        lines += ["", largest(found)]
    return "\n".join(lines)


def _by_kind(program: PlainProgram, ranks: Sequence[peak_memory.RankBytes], most: peak_memory.RankBytes, budget: int | None) -> str:
    waste: dict[str, float] = defaultdict(float)
    coordinates = {} if program.pipeline is None else {program.pipeline.axis: most.rank}
    for port in program.inputs:
        if port.kind in peak_memory.KEPT and port.storage == "device" and program.owns(port.key, coordinates):
            waste[NAMES[port.kind]] += peak_memory.port_bytes(port, program.axis_sizes) - peak_memory.real_bytes(port, program.axis_sizes)
    rows = [(text, bytes_text(size), share_text(waste[text], size)) for text, size in bytes_by_kind(most).items()]
    rows.append(("together", bytes_text(most.total), share_text(sum(waste.values()), sum(most.kept.values()))))
    if budget is not None:
        rows.append(("the budget", bytes_text(budget), ""))
    rows += [(text, bytes_text(size), "") for text, size in most.beside.items() if size]
    title = f"memory of {rank_text(program, most)} (predicted; the peak is where most is alive)"
    lines = [table(rows, ["memory", "bytes/rank", "padding"], title)]
    if most.peak.at:
        lines.append(f"  peak at {most.peak.at}")
    if program.pipeline is not None:
        lines.append(f"  together by rank: {', '.join(bytes_text(one.total) for one in ranks)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------- the largest values


class LayerGroupKey(NamedTuple):
    """Columns of a value that are equal in equal layers and microbatches; such values are one row."""

    lies: str
    made: str
    line: str
    until: str

    @classmethod
    def of(cls, value: Value, called: Callable[[str], str]) -> LayerGroupKey:
        """The key of a value. `called`: maps a module's path to the path shown."""
        return cls(_lies(value), _producer_text(value, called), value.record.source.place if value.record else "", _until(value, called))


def fold_layers(values: Sequence[Value]) -> list[tuple[LayerGroupKey, list[Value]]]:
    """Values of equal layers and microbatches as one row, the largest in total first. A row of one layer has that layer's full path."""
    groups: dict[LayerGroupKey, list[Value]] = {}
    for value in values:
        groups.setdefault(LayerGroupKey.of(value, collapse_layers), []).append(value)
    found = []
    for alike, those in groups.items():
        names = {LayerGroupKey.of(value, str) for value in those}
        found.append((names.pop() if len(names) == 1 else alike, those))
    return sorted(found, key=lambda item: -_bytes_of(item[1]))


def largest(found: Liveness) -> str:
    """Table of the largest computed values that are live at the peak."""
    rows, further = largest_rows(found.values)
    title = f"largest at the peak, of {bytes_text(_bytes_of(found.values))} that the call has made by then (equal layers as one)"
    return "\n  and ".join([table(rows, LARGEST_HEADERS, title), *([" ".join(further)] if further else [])])


def largest_rows(found: Sequence[Value], most: int = LARGEST) -> tuple[list[tuple[str, int, str, str, str, str]], tuple[str, str] | None]:
    """The first `most` rows of the table of values; of further ones the total bytes and the count."""
    folded = fold_layers(found)
    rest = [value for _, values in folded[most:] for value in values]
    further = (bytes_text(_bytes_of(rest)), f"in {len(rest)} other{'s' * (len(rest) > 1)}") if rest else None
    return [(bytes_text(_bytes_of(values)), len(values), *alike) for alike, values in folded[:most]], further


def lines_of(found: Liveness) -> list[str]:
    """The first rows of the table of `largest`, as lines of an error message."""
    rows, further = largest_rows(found.values, 5)
    lines = [f"{size:>8} {f'{count} x' if count > 1 else '':>5} {', '.join(filter(None, alike[:3]))}" for size, count, *alike in rows]
    return [*lines, *([f"{further[0]:>8} {'':>5} {further[1]}"] if further else [])]


def _bytes_of(values: Sequence[Value]) -> int:
    return sum(value.bytes for value in values)


def _lies(value: Value) -> str:
    one = value.record
    if value.key == BESIDE:
        return "copies that collectives send or join"
    if one is None or one.dtype is None:
        return ""
    own = value.bytes if value.made is None else sum(map(ir.local_bytes, ir.records(value.made.node)))
    if value.gradient and value.bytes > own:
        return "gradients, reduced together"
    return f"{str(one.dtype).removeprefix('torch.')} {placement(one.sharding, one.shape)}{' and others beside it' * (value.bytes > own)}"


def _producer_text(value: Value, called: Callable[[str], str]) -> str:
    if value.key == BESIDE:
        return ""
    if value.made is not None:
        return _by(value.made, called)
    where = "" if value.record is None else called(value.record.source.module)
    return ", ".join(word for word in ("another rank", where) if word)


def _until(value: Value, called: Callable[[str], str]) -> str:
    if value.until is not None:
        return _by(value.until, called)
    return "" if value.key == BESIDE else "the end of the call"


def _by(place: ExecutedNode, called: Callable[[str], str]) -> str:
    """`backward mm, model.layers.*.mlp.down_proj`."""
    one = place.record
    words = ir.op_name(place.node).split(".")
    return ", ".join(word for word in (f"{one.phase} {words[min(1, len(words) - 1)]}", called(one.source.module)) if word)


# Memory over a call as a chart of block characters, from the liveness in `meshc/cost/liveness.py`.
#
#     429.1 kB budget |                  ┄▆┄
#                     |        ▂▄▆████▆▄▂
#                     |▂▄▆███████████████▃▃▃▃
#     165.6 kB        |▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒      live for the whole call
#                      forward─backward────upd
#                                      ▲ peak
#
# A column is the maximum of its part of the call; phases are named beneath where their names fit.


WIDTH: Final = 72
HEIGHT: Final = 8
BLOCKS: Final = " ▁▂▃▄▅▆▇█"
FOR_GOOD: Final = "▒"
SHORT: Final = {"forward": "fwd", "backward": "bwd", "update": "upd"}
FAR: Final = 1.5
"""Largest ratio of the budget to the peak at which the budget is drawn."""


def shown_budget(budget: int | None, peak: int) -> int | None:
    """The budget if it is drawn beside the peak; None if it is too far above it."""
    return budget if budget is not None and budget <= FAR * peak else None


def draw_memory(alive: Liveness, budget: int | None = None) -> list[str]:
    """Lines of the chart; none if a call computes no values. `budget`: bytes that a rank may hold."""
    course, kept = alive.course, sum(alive.holds.kept.values())
    if not course or not alive.holds.peak.total:
        return []
    parts = [course[len(course) * at // WIDTH : max(len(course) * (at + 1) // WIDTH, len(course) * at // WIDTH + 1)] for at in range(WIDTH)]
    columns = [kept + max(size for size, _ in part) for part in parts]
    phases = [Counter(phase for _, phase in part).most_common(1)[0][0] for part in parts]
    shown = shown_budget(budget, alive.holds.total)
    top = max(alive.holds.total, shown or 0)
    labels = _labels(alive.holds.total, kept, shown, top)
    left = max(map(len, labels))
    rows = [f"{label:>{left}} │{_row(row, columns, kept, shown, top)}".rstrip() for row, label in enumerate(labels)]
    peak = next(at for at in range(WIDTH) if columns[at] == alive.holds.total)
    return [*rows, f"{'':{left}}  {''.join(_under(phases))}", f"{'':{left}}  {'':{peak}}▲"]


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
