"""Note on exposed host copies: what a call waits for device-host transfers that computation does not hide.

    offload: copies take 12.4 ms of a call on h100 (51.2 GB/s each way), of which 3.1 ms are not hidden behind the 20.0 ms that it computes;
    it waits longest for what model.layers.3.mlp made: 117,440,512 bytes take 2.3 ms, and 0.8 ms are computed meanwhile
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Final

from torch.fx import Node

from meshc.cost import peak_memory
from meshc.cost.devices import Device, Link
from meshc.cost.links import host_copy_seconds
from meshc.cost.stage_clock import HOST, run_clock
from meshc.ir import calls, local_bytes, record, spmd
from meshc.passes.phases.lowered_program import LoweredProgram

LEAST_S: Final = 1e-5
"""Seconds; a shorter wait is not reported."""
EXPOSED: Final = "are not hidden behind"
"""Words by which readers of notes recognise this one as a warning."""


def exposed_copies_note(lowered: LoweredProgram, device: Device) -> str:
    """The note's text; empty if no stage copies to or from the host, or the device has no link to it."""
    if not any(spmd.is_host_copy(node.target) for stage in lowered.stages.values() for node in calls(stage.graph)):
        return ""
    free = replace(device, host=Link(0.0, float("inf")))
    runs = peak_memory.runs(lowered.as_program())
    copies = waits = computes = 0.0
    longest: tuple[float, Node | None] = LEAST_S, None
    for name, stage in lowered.stages.items():
        takes, clock = run_clock(stage.graph, lowered.mesh, device)
        without, _ = run_clock(stage.graph, lowered.mesh, free)
        times = runs[name]
        copies += times * takes.communication.get(HOST, 0.0)
        computes += times * takes.compute
        waits += times * max(0.0, takes.total - without.total)
        copied = [(seconds, node) for node, seconds in clock.waited.items() if spmd.is_host_copy(node.target)]
        longest = max([longest, *copied], key=itemgetter(0))
    link = device.host_link
    if not copies or link is None:
        return ""
    hidden = "all of them hidden behind" if waits < LEAST_S else f"of which {_text(waits)} {EXPOSED}"
    said = f"offload: copies take {_text(copies)} of a call on {device.name} ({link.bandwidth_Bps / 1e9:.1f} GB/s each way), {hidden} the "
    said += f"{_text(computes)} that it computes"
    if waits < LEAST_S:
        return said
    seconds, node = longest
    if node is not None:
        size = local_bytes(record(node))
        takes_s = host_copy_seconds(node, device)
        what = f"what {record(node).source.module} made" if record(node).source.module else node.all_input_nodes[-1].name
        beside = f"{size:,} bytes take {_text(takes_s)}, and {_text(max(0.0, takes_s - seconds))} are computed meanwhile"
        said += f"; it waits longest for {what}: {beside}"
    return said


def _text(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"
