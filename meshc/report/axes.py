"""Account of each mesh axis: arithmetic and bytes that the axis spares a rank, and the messages that a rank sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshc.cost import divided_work, peak_memory
from meshc.cost.devices import Device
from meshc.cost.links import link_of, send_seconds
from meshc.plan.entries import AxisEntry
from meshc.program.program import PlainProgram
from meshc.report.account import link_accounts
from meshc.report.summary import CollectiveUse


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
