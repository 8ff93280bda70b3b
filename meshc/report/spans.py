"""Timeline of a single-stage program: spans of computing, by phase, and of waiting for ranks and the host.

    computes  |forward  |   |forward |backward      |  |update|
    waits               |---|                       |--|
"""

from __future__ import annotations

from typing import NamedTuple

from meshc import ir
from meshc.cost.devices import Device
from meshc.cost.roofline import seconds
from meshc.cost.stage_clock import run_clock
from meshc.ir import spmd
from meshc.program.program import PlainProgram


class TimeSpan(NamedTuple):
    """A span from `start_s` to `end_s`. `waits`: the rank waits for a transfer that the next operator reads, or loses the time to
    contention with messages."""

    phase: str
    waits: bool
    start_s: float
    end_s: float


def spans(program: PlainProgram, device: Device) -> list[TimeSpan]:
    """The spans of a call by its predicted clock; none for a program with several stages, which has a timeline, or with host operators."""
    if program.pipeline is not None or len(program.stages) != 1 or len(program.schedule) != 1:
        return []
    total, clock = run_clock(program.stage.graph, program.mesh, device)
    if total.there:
        return []
    found: list[TimeSpan] = []
    now, phase = 0.0, ir.PHASES[0]
    for node in ir.calls(program.stage.graph):
        if spmd.is_collective(node.target) or (spmd.is_host_copy(node.target) and device.host is not None):
            continue
        phase, end = ir.records(node)[0].phase, clock.made[node]
        begin = max(now, end - seconds(node, device))
        found = _longer(_longer(found, TimeSpan(phase, True, now, begin)), TimeSpan(phase, False, begin, end))
        now = max(now, end)
    return _longer(found, TimeSpan(phase, True, now, total.total))


def _longer(found: list[TimeSpan], more: TimeSpan) -> list[TimeSpan]:
    """The spans with one more, merged into the last one if it continues that."""
    if more.end_s <= more.start_s:
        return found
    if found and (found[-1].phase, found[-1].waits, found[-1].end_s) == (more.phase, more.waits, more.start_s):
        found[-1] = found[-1]._replace(end_s=more.end_s)
    else:
        found.append(more)
    return found
