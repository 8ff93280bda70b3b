"""Predicted timeline of one call of a program: its stages and transfers on each rank.

    rank 0  |before|F0.0|F0.1|      |B0.0|  |B0.1|       |after|        after: starts on all ranks once the last of them is ready,
    rank 1  |before|     |F1.0|B1.0|F1.1|B1.1|           |after|        if the ranks exchange anything in it

The microbatches run as in `timing.simulate`. A collective that starts within a microbatch overlaps with it, and is waited for where the
final stage first reads its result; its preparation counts with the final stage. A parameter that another rank owns arrives before the
receiving rank starts, although its first stage may not read the parameter. A program without pipeline stages has one row, since all its
ranks run the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Final

from meshc.cost import peak_memory
from meshc.cost.devices import Device, Given, RankDevices, devices_of
from meshc.cost.instruction_clock import InstructionCost, arrival_seconds, early_collectives, play_instructions
from meshc.cost.links import pair_link, send_seconds
from meshc.cost.pipeline_costs import costs_of
from meshc.cost.stage_clock import run_clock, stage_seconds
from meshc.ir import spmd
from meshc.pipelining.events import CallTransfer, StageRun
from meshc.pipelining.pipeline_stages import Move, Pipeline, stage_name
from meshc.pipelining.schedule import Action
from meshc.pipelining.timing import Event, Timeline, simulate
from meshc.program.program import PlainProgram, Stage

MODES: Final = {"step": "training step", "autograd": "forward and backward", "forward": "forward"}
"""Printed name of each mode of a program."""


def predict_timeline(program: PlainProgram, given: Given | None = None) -> Timeline:
    """One call, on `given` devices or else the mesh's. Of a pipeline a row is a rank of its axis: ranks along other axes are alike."""
    devices, pipeline = devices_of(program.mesh, given), program.pipeline
    if pipeline is None:
        return Timeline(tuple(_one_after_another(program, devices.slowest())), 1, f"{MODES[program.mode]}, predicted")
    ranks = range(pipeline.schedule.ranks)
    on, sizes = [devices.slowest({pipeline.axis: rank}) for rank in ranks], peak_memory.value_bytes(program)
    events = [
        Event(rank, StageRun(name), 0.0, stage_seconds(program.stages[name].graph, program.mesh, on[rank]).total)
        for rank in ranks if (name := f"before_{rank}") in program.stages
    ]  # fmt: skip
    events += _transfer_events(pipeline.shared, [0.0 for _ in ranks], sizes, pipeline.axis, devices)
    begin = _finish_times(events, [0.0 for _ in ranks])
    line = simulate(pipeline.schedule, costs_of(pipeline, program.stages, program.mesh, given), begin)
    ends = _finish_times([event for row in line.action_events for event in row], begin)
    returned = _transfer_events(pipeline.returned, ends, sizes, pipeline.axis, devices)
    ready = _finish_times(returned, ends)
    if _has_final_exchange(program, pipeline):
        ready = [max(ready) for _ in ranks]
    late = [event for rank in ranks for event in _final_stage_events(program, rank, ready[rank], line.action_events[rank], on[rank])]
    return Timeline((*events, *line.events, *returned, *late), len(ranks), f"{pipeline.schedule.name or 'own schedule'}, predicted")


def _one_after_another(program: PlainProgram, device: Device) -> Iterator[Event]:
    """The schedule of a program without pipeline stages. Accumulation of sums, and preparation of collectives that start early, count
    with the run before them."""
    run: InstructionCost | None = None
    end = 0.0
    for took in play_instructions(program, program.schedule, device):
        if took.step.op == "run":
            if run is not None:
                yield Event(0, StageRun(run.step.stage, run.step.microbatch), run.start_s, end)
            run = took
        end = took.start_s + took.seconds.total
    if run is not None:
        yield Event(0, StageRun(run.step.stage, run.step.microbatch), run.start_s, end)


def _final_stage_events(program: PlainProgram, rank: int, ready: float, actions: Sequence[Event], device: Device) -> Iterator[Event]:
    """The final stage that a rank runs after the last microbatch, with the preparation of its early collectives. `actions`: the events of
    the microbatches."""
    assert program.pipeline is not None
    stage = program.stages.get(f"after_{rank}")
    if stage is None:
        return
    run = cache(partial(run_clock, mesh=program.mesh, device=device))
    ran = {event.instruction: event for event in actions}
    within: dict[Action, list[Stage]] = {}
    for start in program.pipeline.starts:
        within.setdefault(start.during, []).append(program.stages[start.stage])
    due: dict[str, float] = {}
    prepared = 0.0
    for action, starts in within.items():
        if (event := ran.get(action)) is not None:
            found = early_collectives(program.stages[stage_name(action)], starts, run)
            due |= {key: event.start_s + one.end_s for one in found for key in one.start.outputs}
            prepared += sum(run(one.graph)[0].compute for one in starts)
            prepared += device.contention * sum(one.overlap_s(event.end_s - event.start_s) for one in found)
    begin = ready + prepared
    takes = stage_seconds(stage.graph, program.mesh, device, arrival_seconds(stage, due, begin)).total
    yield Event(rank, StageRun(stage.name), ready, begin + takes)


def _transfer_events(
    moves: Sequence[Move], ready: Sequence[float], sizes: Mapping[str, int], axis: str, devices: RankDevices
) -> list[Event]:
    """Values that go once a call, one after another between two ranks. `ready`: when each rank posts its own."""
    free: dict[tuple[int, int], float] = {}
    found = []
    for move in moves:
        start = max(ready[move.source], ready[move.target], free.get((move.source, move.target), 0.0))
        end = free[move.source, move.target] = start + send_seconds(sizes[move.key], pair_link(devices, axis, move.source, move.target))
        found.append(Event(move.source, CallTransfer("SEND", move.key, move.source, move.target), start, end))
        found.append(Event(move.target, CallTransfer("RECV", move.key, move.source, move.target), ready[move.target], end))
    return found


def _finish_times(events: Sequence[Event], least: Sequence[float]) -> list[float]:
    """Time at which each rank has finished its stages and received its messages; at least `least`."""
    ends = list(least)
    for event in events:
        if not (isinstance(event.instruction, CallTransfer) and event.instruction.op == "SEND"):
            ends[event.rank] = max(ends[event.rank], event.end_s)
    return ends


def _has_final_exchange(program: PlainProgram, pipeline: Pipeline) -> bool:
    """Whether ranks of the pipeline axis exchange anything after the last microbatch."""
    late = [stage for name, stage in program.stages.items() if name.startswith("after_")]
    nodes = [node for stage in late for node in stage.graph.nodes if spmd.is_collective(node.target)]
    return any(pipeline.axis in node.args[1] for node in nodes)
