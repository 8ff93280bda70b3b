"""Data of a report page (plan, axes, time, memory, collectives, modules, values) from a program; `meshc/report/html.py` renders it.

All figures are those of the summary, computed by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshc.cost import divided_work, peak_memory
from meshc.cost.call_timeline import MODES, predict_timeline
from meshc.cost.devices import Device, devices_of
from meshc.cost.links import link_of, send_seconds
from meshc.cost.liveness import Liveness, peak_liveness
from meshc.cost.program_clock import program_seconds
from meshc.ir import PHASES
from meshc.pipelining import draw
from meshc.pipelining.pipeline_candidate import PipelineCandidate
from meshc.plan.entries import AxisEntry
from meshc.plan.plan_candidate import PlanCandidate
from meshc.program.program import PlainProgram
from meshc.report import memory_report, offload_table, search_tables
from meshc.report.account import STAGE_HEADERS, link_accounts, stage_rows
from meshc.report.spans import TimeSpan, spans
from meshc.report.summary import CollectiveTraffic, CollectiveUse, collectives, times, traffic, why
from meshc.report.tree import Branch, FoldedValues, tree, values

POINTS = 360
"""Points of the memory curve over a call; each is the maximum of its part."""
SHOWN_VALUES = 1500


class Head(NamedTuple):
    """The head of the page, which a notebook shows too.

    plan     the plan's lines, each with its origin
    step_s   predicted seconds of a call on `device`;  holds  peak bytes of the rank with most
    """

    name: str
    what: str
    mesh: str
    ranks: int
    backend: str
    microbatches: int
    plan: tuple[tuple[str, str], ...]
    device: str
    device_source: str
    step_s: float
    holds: int
    budget: int | None


class Grid(NamedTuple):
    """A table of texts."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


class Largest(NamedTuple):
    """Collectives of equal layers, and the line of the user's model that they come from."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    times: int
    bytes: int
    seconds: float
    reason: str
    line: str
    code: str


class Memory(NamedTuple):
    """Memory of the rank with most.

    kinds    bytes by kind;  kept  bytes that are live for the whole call
    course   (bytes without `kept`, phase) over the call;  peak  index of the peak
    largest  the ten largest values at the peak, and what is said of further ones
    """

    whose: str
    at: str
    kinds: Sequence[tuple[str, int]]
    kept: int
    total: int
    budget: int | None
    course: Sequence[tuple[int, str]]
    peak: int
    largest: Sequence[Sequence[object]]
    further: str


@dataclass(frozen=True)
class Page:
    """A report.

    weighed, tried  candidates of the searches; None if not known, as for a saved program
    timeline        timeline of the stages, as SVG;  spans  spans of the only stage of a program without a pipeline
    """

    head: Head
    notes: Sequence[str]
    weighed: Grid | None
    tried: Grid | None
    axes: Sequence[AxisAccount]
    times: Mapping[str, float]
    hidden_s: float
    traffic: Sequence[CollectiveTraffic]
    largest: Sequence[Largest]
    copies: Grid
    memory: Memory
    stages: Grid
    timeline: str
    spans: Sequence[TimeSpan]
    tree: Branch
    values: Sequence[tuple[FoldedValues, int]]
    further_values: int


def head(program: PlainProgram, name: str, device: str | None = None, budget: int | None = None) -> Head:
    """`name`: of the model; `device`: whose times, or else the mesh's; `budget`: bytes that a rank may hold, where the user has said so."""
    on = devices_of(program.mesh, device).slowest()
    return _head(program, name, on, program_seconds(program, device).total, peak_memory.peak_rank(program).total, budget)


def page(
    program: PlainProgram, name: str, device: str | None = None, budget: int | None = None,
    weighed: Sequence[PlanCandidate] | None = None, tried: Sequence[PipelineCandidate] | None = None,
) -> Page:  # fmt: skip
    """All of it; arguments as `head` has them."""
    on = devices_of(program.mesh, device).slowest()
    takes, found = program_seconds(program, device), peak_liveness(program)
    uses, made = collectives(program, on), values(program)
    return Page(
        head=_head(program, name, on, takes.total, found.holds.total, budget),
        notes=program.notes,
        weighed=None if weighed is None else Grid(*search_tables.plan_candidate_rows(weighed)),
        tried=None if tried is None else Grid(*search_tables.tried_rows(tried)),
        axes=axes(program, uses, on),
        times=times(program, takes),
        hidden_s=takes.hidden_s,
        traffic=sorted(traffic(uses), key=lambda one: (one.axes, PHASES.index(one.phase), -one.seconds)),
        largest=_largest(uses),
        copies=Grid(offload_table.HEADERS, offload_table.rows_of(program)),
        memory=_memory(program, found, budget),
        stages=_stages(program, device),
        timeline=draw.svg(predict_timeline(program, device)),
        spans=spans(program, on),
        tree=tree(program),
        values=made[:SHOWN_VALUES],
        further_values=sum(count for _, count in made[SHOWN_VALUES:]),
    )


def _head(program: PlainProgram, name: str, on: Device, step_s: float, holds: int, budget: int | None) -> Head:
    plan = program.plan
    lines = [(str(entry), f"line {entry.line} of the plan" if entry.line else entry.source) for entry in plan.axes]
    lines += [(str(line), f"line {line.line} of the plan" if line.line else "") for line in plan.lines()]
    return Head(
        name, MODES[program.mode], str(program.mesh), program.mesh.world_size, program.backend, program.microbatches, tuple(lines), on.name,
        on.source, step_s, holds, budget,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------- collectives


def _largest(uses: Sequence[CollectiveUse]) -> list[Largest]:
    groups: dict[tuple[object, ...], list[CollectiveUse]] = {}
    for use in uses:
        groups.setdefault((use.kind, use.axes, use.phase, use.bytes_per_rank, why(use), use.source.file, use.source.line), []).append(use)
    found = []
    for those in groups.values():
        one = those[0]
        line = f"{one.source.file}:{one.source.line}" if one.source.file else ""
        reason = one.reason if len(those) == 1 else why(one) + "".join(one.reason.partition("; ")[1:])
        found.append(
            Largest(one.kind, one.axes, one.phase, sum(use.times for use in those), one.bytes_per_rank, sum(use.seconds for use in those),
                    reason, line, one.source.code)
        )  # fmt: skip
    return sorted(found, key=lambda one: -one.seconds)[:10]


# --------------------------------------------------------------------------------------------------------------------------- memory


def _memory(program: PlainProgram, found: Liveness, budget: int | None) -> Memory:
    most = found.holds
    kinds = [(text, size) for text, size in [*memory_report.bytes_by_kind(most).items(), *most.beside.items()] if size]
    largest, further = memory_report.largest_rows(found.values)
    return Memory(
        memory_report.rank_text(program, most), most.peak.at, kinds, sum(most.kept.values()), most.total, budget,
        *_fewer(found.course, found.peak), largest, " ".join(further or ()),
    )  # fmt: skip


def _fewer(course: Sequence[tuple[int, str]], peak: int) -> tuple[list[tuple[int, str]], int]:
    """At most POINTS points of a course, each the maximum of its part, and the index of the one with the peak."""
    count = min(len(course), POINTS)
    starts = [len(course) * at // count for at in range(count)]
    parts = [course[start:end] for start, end in zip(starts, [*starts[1:], len(course)], strict=True)]
    return [max(part) for part in parts], max((at for at, start in enumerate(starts) if start <= peak), default=0)


def _stages(program: PlainProgram, device: str | None) -> Grid:
    """Stages of a pipeline; no rows where there is none."""
    rows = [] if program.pipeline is None else stage_rows(program, device)
    return Grid(STAGE_HEADERS, [[*map(str, row)] for row in rows])


# Account of each mesh axis: arithmetic and bytes that the axis spares a rank, and the messages that a rank sends.


class AxisAccount(NamedTuple):
    """One axis.

    splits      the plan's entry, with its origin in `source`; "" if the plan has none, as for a pipeline axis
    share       share of the arithmetic (matrix products, convolutions, attention) that the axis splits;  could  likewise, of the arithmetic
                that it could split. None: not known, or there is none
    times       a rank's arithmetic if the axis split nothing, as a multiple of today's
    spared      bytes of parameters, state, buffers and inputs that the axis saves a rank
    sends       number of collectives of a call over the axis, alone or with others, with their `bytes` and their `seconds` without overlap;
                for a pipeline axis also the messages of the rank that sends most
    """

    name: str
    size: int
    splits: str
    source: str
    share: float | None
    could: float | None
    times: float | None
    spared: int
    sends: int
    bytes: int
    seconds: float


def axes(program: PlainProgram, uses: Sequence[CollectiveUse], device: Device) -> list[AxisAccount]:
    """Accounts of all axes, in the mesh's order. `uses`: the program's collectives, with seconds on the device."""
    rows = divided_work.work_rows(program) or []
    found = []
    for axis in program.mesh.axes:
        entry = program.plan.entry(axis.name)
        mine = [use for use in uses if axis.name in use.axes]
        stages = program.pipeline is not None and axis.name == program.pipeline.axis
        nothing = stages or axis.size == 1
        share, could = (None, None) if nothing else (divided_work.share(rows, axis.name), divided_work.share(rows, axis.name, legal=True))
        messages, sent, takes = _messages(program, axis.name, device) if stages else (0, 0, 0.0)
        times = axis.size if stages else None if share is None else 1 + share * (axis.size - 1)
        found.append(
            AxisAccount(
                axis.name, axis.size, "stages of the model" if stages else "" if entry is None else str(entry).partition(": ")[2],
                _source(entry, stages), share, could, times, _saved_bytes(program, axis.name, stages),
                messages + sum(use.times for use in mine), sent + sum(use.times * use.bytes_per_rank for use in mine),
                takes + sum(use.seconds for use in mine),
            )
        )  # fmt: skip
    return found


def _messages(program: PlainProgram, axis: str, device: Device) -> tuple[int, int, float]:
    """(messages, bytes, seconds without overlap) of the rank that sends most to other stages."""
    wire = link_of(program.mesh, [axis], device)
    links = link_accounts(program)
    found = [(0, 0, 0.0)]
    for rank in {link.source for link in links}:
        count, size = (sum(each) for each in zip(*((link.messages, link.bytes) for link in links if link.source == rank), strict=True))
        found.append((count, size, count * send_seconds(size / count, wire)))
    return max(found, key=lambda one: one[1:])


def _source(entry: AxisEntry | None, stages: bool) -> str:
    if entry is None:
        return "the axis's name" if stages else "nothing in the plan"
    return f"the plan, line {entry.line}" if entry.source == "hand" and entry.line else entry.source


def _saved_bytes(program: PlainProgram, axis: str, stages: bool) -> int:
    """What a rank would hold more for the whole call if the axis had one rank."""
    ports = [port for port in program.inputs if port.kind in peak_memory.KEPT and port.storage == "device"]
    now, alone = program.axis_sizes, {**program.axis_sizes, axis: 1}
    if not stages:
        return sum(peak_memory.port_bytes(port, alone) - peak_memory.port_bytes(port, now) for port in ports)
    held = [
        sum(peak_memory.port_bytes(port, now) for port in ports if program.owns(port.key, {axis: rank}))
        for rank in range(program.mesh.size(axis))
    ]  # fmt: skip
    return sum(peak_memory.port_bytes(port, now) for port in ports) - max(held)
