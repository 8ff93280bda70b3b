"""What a call of a program is predicted to look like: a timeline of its stages.

    rank 0  |before|F0.0|F0.1|      |B0.0|  |B0.1|       |after|        after: begins on all ranks when the last of them is there,
    rank 1  |before|     |F1.0|B1.0|F1.1|B1.1|           |after|        if the ranks exchange anything in it

The microbatches are played as `timing.simulate` does. A parameter that another rank owns arrives before that rank begins, although what
the rank runs first may not read it. A program without pipeline stages has one row, since all its ranks are alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from meshc.cost import memory
from meshc.cost.clock import stage_seconds
from meshc.cost.devices import Device, Link, for_mesh
from meshc.cost.links import link_of, send_seconds
from meshc.cost.predict import costs_of
from meshc.ir import spmd
from meshc.pipelining.cut import Move, Pipeline
from meshc.pipelining.events import Handed, Run
from meshc.pipelining.timing import Event, Timeline, simulate
from meshc.program.accumulate import ACCUMULATES
from meshc.program.program import Program

MODES: Final = {"step": "training step", "autograd": "forward and backward", "forward": "forward"}
"""What a program's mode is called."""


def predicted(program: Program, device: Device | None = None) -> Timeline:
    """One call; by default on the mesh's device. Of a pipeline a row is a rank of its axis: ranks along other axes are alike."""
    device = device or for_mesh(program.mesh)
    pipeline = program.pipeline
    if pipeline is None:
        return Timeline(tuple(_one_after_another(program, device)), 1, f"{MODES[program.mode]}, predicted")
    ranks = range(pipeline.schedule.ranks)
    takes = {name: stage_seconds(program.stages[name].graph, program.mesh, device).total for name in program.stages}
    wire, sizes = link_of(program.mesh, [pipeline.axis], device), memory.value_bytes(program)
    events = [Event(rank, Run(name), 0.0, takes[name]) for rank in ranks if (name := f"before_{rank}") in takes]
    events += _handed(pipeline.shared, [0.0 for _ in ranks], sizes, wire)
    begin = _ends(events, [0.0 for _ in ranks])
    line = simulate(pipeline.schedule, costs_of(pipeline, program.stages, program.mesh, device), begin)
    ends = _ends([event for row in line.computed for event in row], begin)
    returned = _handed(pipeline.returned, ends, sizes, wire)
    ready = _ends(returned, ends)
    if _meet(program, pipeline):
        ready = [max(ready) for _ in ranks]
    late = [Event(rank, Run(name), ready[rank], ready[rank] + takes[name]) for rank in ranks if (name := f"after_{rank}") in takes]
    return Timeline((*events, *line.events, *returned, *late), len(ranks), f"{pipeline.schedule.name or 'own schedule'}, predicted")


def _one_after_another(program: Program, device: Device) -> Iterator[Event]:
    """The schedule of a program without pipeline stages. What is added to sums counts with the stage that made it."""
    takes = {name: stage_seconds(stage.graph, program.mesh, device).total for name, stage in program.stages.items()}
    made = {key: size for stage in program.stages.values() for key, size in memory.output_bytes(stage).items()}
    sums: set[str] = set()
    now = 0.0
    steps = [*program.schedule]
    for position, step in enumerate(steps):
        if step.op != "run":
            continue
        start, now = now, now + takes[step.stage]
        for other in steps[position + 1 :]:
            if other.op not in ACCUMULATES:
                break
            now += device.launch_s + 3 * made[other.value] / device.bytes_per_s if other.into in sums else 0.0
            sums.add(other.into)
        yield Event(0, Run(step.stage, step.microbatch), start, now)


def _handed(moves: Sequence[Move], ready: Sequence[float], sizes: Mapping[str, int], wire: Link) -> list[Event]:
    """Values that go once a call, one after another between two ranks. `ready`: when each rank posts its own."""
    free: dict[tuple[int, int], float] = {}
    found = []
    for move in moves:
        start = max(ready[move.source], ready[move.target], free.get((move.source, move.target), 0.0))
        end = free[move.source, move.target] = start + send_seconds(sizes[move.key], wire)
        found.append(Event(move.source, Handed("SEND", move.key, move.source, move.target), start, end))
        found.append(Event(move.target, Handed("RECV", move.key, move.source, move.target), ready[move.target], end))
    return found


def _ends(events: Sequence[Event], least: Sequence[float]) -> list[float]:
    """When each rank is done with these: with stages, and with what it receives."""
    ends = list(least)
    for event in events:
        if not (isinstance(event.instruction, Handed) and event.instruction.op == "SEND"):
            ends[event.rank] = max(ends[event.rank], event.end_s)
    return ends


def _meet(program: Program, pipeline: Pipeline) -> bool:
    """Whether ranks of the pipeline axis exchange anything after the last microbatch."""
    late = [stage for name, stage in program.stages.items() if name.startswith("after_")]
    nodes = [node for stage in late for node in stage.graph.nodes if spmd.is_collective(node.target)]
    return any(pipeline.axis in node.args[1] for node in nodes)
