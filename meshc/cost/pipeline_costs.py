"""Predicted seconds of pipeline actions and messages, and bytes sent or kept by stages for each microbatch, from the per-rank graphs."""

from __future__ import annotations

from collections.abc import Mapping

from meshc.cost.devices import Device, Given, devices_of
from meshc.cost.links import pair_link, send_seconds
from meshc.cost.peak_memory import output_bytes
from meshc.cost.stage_clock import stage_seconds
from meshc.ir import local_bytes, record
from meshc.ir.keys import is_a
from meshc.ir.mesh import Mesh
from meshc.pipelining.pipeline_stages import STAGE_NAMES, Pipeline
from meshc.pipelining.timing import Costs
from meshc.program.accumulate import whole_of
from meshc.program.program import Stage


def costs_of(pipeline: Pipeline, stages: Mapping[str, Stage], mesh: Mesh, given: Given | None = None) -> Costs:
    """Seconds of each half of each stage on a rank, and of the messages between stages; on `given` devices or else the mesh's:
    of a stage those of its ranks, of a message those of both ends.

    Accumulating or joining a half's results over microbatches counts with the half, averaged over microbatches: the first adds nothing.
    """
    devices, rank_of = devices_of(mesh, given), pipeline.schedule.rank_of
    ops = {name: op for op, name in STAGE_NAMES.items()}
    seconds = {}
    for stage in stages.values():
        kind, _, number = stage.name.rpartition("_")
        if kind in ops:
            device = devices.slowest({pipeline.axis: rank_of(int(number))})
            parts = [(way[0], size) for key, size in output_bytes(stage).items() if (way := whole_of(key)) is not None]
            taken_in_s = sum(mean_accumulation_s(op, size, pipeline.schedule.microbatches, device) for op, size in parts)
            seconds[ops[kind], int(number)] = stage_seconds(stage.graph, mesh, device).total + taken_in_s
    sizes = flow_bytes(stages)
    sends = {}
    for link, keys in pipeline.messages.items():
        wire = pair_link(devices, pipeline.axis, rank_of(link.source), rank_of(link.target))
        sends[link] = (len(keys) - 1) * wire.latency_s + send_seconds(sum(sizes[key] for key in keys), wire)
    return Costs(seconds, sends)


def accumulation_s(op: str, size: float, device: Device) -> float:
    """Seconds of adding a part of `size` bytes to its sum, or of joining it."""
    return device.launch_s + (2 if op == "join" else 3) * size / device.bytes_per_s


def mean_accumulation_s(op: str, size: float, microbatches: int, device: Device) -> float:
    """Mean seconds per microbatch of the same; of a sum the first part adds nothing."""
    return (1.0 if op == "join" else 1 - 1 / max(microbatches, 1)) * accumulation_s(op, size, device)


def flow_bytes(stages: Mapping[str, Stage]) -> dict[str, int]:
    """Bytes on a rank of each value that stages send or keep for others, for one microbatch; 0 if the value is on the host."""
    found = {}
    for stage in stages.values():
        for key, node in stage.results().items():
            if is_a(key, "flow"):
                found[key] = 0 if record(node).storage != "device" else local_bytes(record(node))
    return found


def saved_bytes(stages: Mapping[str, Stage], count: int) -> list[int]:
    """Bytes of one microbatch that each stage keeps from its forward to its backward."""
    sizes = flow_bytes(stages)
    found = []
    for stage in range(count):
        late = [stages[name] for name in (f"backward_{stage}", f"input_{stage}", f"weight_{stage}") if name in stages]
        read = {key for one in late for key in one.inputs if is_a(key, "flow")}
        made = {key for one in late for key in one.outputs}
        here = set(stages[f"forward_{stage}"].outputs) | set(stages[f"forward_{stage}"].inputs)
        found.append(sum(sizes[key] for key in (read - made) & here))
    return found
