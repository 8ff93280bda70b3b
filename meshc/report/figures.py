"""Figures of a program as plain JSON data: plan, shardings, collectives, memory and predicted seconds.

    {"plan": ["dp: batch", ...], "storage": {"fc.weight": {"params": "[ffn 8/tp, 4]", ...}},
     "collectives": [{"phase": "update", "collective": "all_reduce", "axes": ["dp"], "count": 1, "bytes_per_rank": 128}, ...],
     "memory_bytes": {"parameters": 64, ..., "together": 512}, "seconds": {"computing": 1e-4, "communicating over dp": 2e-4, ...}}

Bytes are per rank, in a pipeline those of the rank with most; collectives are those of one call, counted as in the summary; seconds are
predicted.
"""

from __future__ import annotations

from typing import TypedDict

from meshc.cost import peak_memory
from meshc.cost.call_timeline import MODES
from meshc.cost.devices import devices_of
from meshc.cost.program_clock import program_seconds
from meshc.plan.entries import STORES
from meshc.program.program import PlainProgram
from meshc.report.memory_report import bytes_by_kind
from meshc.report.summary import collectives, gradient_shardings, times, traffic
from meshc.report.tables import placement


class CollectiveFigures(TypedDict):
    """The collectives of one kind over the same axes in one phase."""

    phase: str
    collective: str
    axes: list[str]
    count: int
    bytes_per_rank: int


class Figures(TypedDict):
    """The figures of a program."""

    mode: str
    mesh: str
    ranks: int
    microbatches: int
    device: str
    plan: list[str]
    storage: dict[str, dict[str, str]]
    collectives: list[CollectiveFigures]
    memory_bytes: dict[str, int]
    seconds: dict[str, float]
    notes: list[str]


def figures(program: PlainProgram, device: str | None = None) -> Figures:
    """The figures of a program; times are those of a device by name, or of the mesh's."""
    takes = program_seconds(program, device)
    return Figures(
        mode=MODES.get(program.mode, program.mode),
        mesh=str(program.mesh),
        ranks=program.mesh.world_size,
        microbatches=program.microbatches,
        device=devices_of(program.mesh, device).slowest().name,
        plan=str(program.plan).splitlines(),
        storage=_storage(program),
        collectives=[
            CollectiveFigures(phase=one.phase, collective=one.kind, axes=list(one.axes), count=one.times, bytes_per_rank=one.bytes)
            for one in traffic(collectives(program))
        ],
        memory_bytes=_memory(program),
        seconds={**times(program, takes), "hidden behind computing": takes.hidden_s, "together": takes.total},
        notes=list(program.notes),
    )


def _storage(program: PlainProgram) -> dict[str, dict[str, str]]:
    """Shardings of each parameter, of its gradient as the update reads it, and of its state."""
    gradients = gradient_shardings(program)
    states = {(port.of, port.shape): port.sharding for port in program.inputs if port.kind == "state"}
    found = {}
    for port in program.inputs:
        if port.kind == "parameter":
            lies = (port.sharding, gradients.get(port.name), states.get((port.name, port.shape)))
            found[port.name] = {kind: placement(one, port.shape) for kind, one in zip(STORES, lies, strict=True) if one is not None}
    return found


def _memory(program: PlainProgram) -> dict[str, int]:
    most = peak_memory.peak_rank(program)
    return {**bytes_by_kind(most), "together": most.total, **{text: size for text, size in most.beside.items() if size}}
