"""What a program takes: its stages on a clock, its schedule's sum; and what a rank must keep in memory.

    computing   |mm|mm|..wait..|mm|          a collective starts where it stands, and is waited for where its result is first read
    link           |all_reduce |

So it is in the generated code (`runtime/codegen.py`). What the clock assumes: computing and communicating do not slow each other down; a
rank has one link, on which collectives go one after another; all ranks are equally fast; stages do not overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from meshc import memory, spmd
from meshc.cost.devices import Device
from meshc.cost.links import collective_seconds
from meshc.cost.operators import seconds
from meshc.errors import CompileError
from meshc.mesh import Mesh
from meshc.program import Program, sizes


@dataclass(frozen=True)
class Seconds:
    """Predicted seconds on a rank.

    compute         of all operators
    communication   of all collectives, by their axes (`dp`, or `dp, tp`)
    total           on the clock; less than the sum by what runs at the same time
    """

    compute: float = 0.0
    communication: Mapping[str, float] = field(default_factory=dict)
    total: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        both: Counter[str] = Counter(self.communication)
        both.update(other.communication)
        return Seconds(self.compute + other.compute, dict(both), self.total + other.total)

    @property
    def hidden(self) -> float:
        """Seconds of communication beside which something is computed."""
        return self.compute + sum(self.communication.values()) - self.total


def stage_seconds(graph: Graph, mesh: Mesh, device: Device) -> Seconds:
    """One run of a stage's per-rank graph."""
    now = free = compute = 0.0
    communication: dict[str, float] = {}
    ready: dict[Node, float] = {}
    for node in graph.nodes:
        now = max([now, *(ready.pop(operand) for operand in node.all_input_nodes if operand in ready)])
        if node.op == "call_function" and spmd.is_collective(node.target):
            takes = collective_seconds(node, mesh, device)
            axes = ", ".join(node.args[1])
            communication[axes] = communication.get(axes, 0.0) + takes
            free = ready[node] = max(now, free) + takes
        else:
            takes = seconds(node, device)
            compute += takes
            now += takes
    return Seconds(compute, {axes: takes for axes, takes in communication.items() if takes}, max(now, free))


def program_seconds(program: Program, device: Device) -> Seconds:
    """One call of a program: its schedule, instruction after instruction. Raises CompileError for one that it does not know."""
    stages = {name: stage_seconds(stage.graph, program.mesh, device) for name, stage in program.stages.items()}
    made = {key: size for stage in program.stages.values() for key, size in memory.output_bytes(stage).items()}
    sums: set[str] = set()
    total = Seconds()
    for instruction in program.schedule:
        if instruction.op == "run":
            total += stages[instruction.stage]
        elif instruction.op == "add":
            if instruction.into in sums:  # the first part becomes the sum
                takes = device.launch_s + 3 * made[instruction.value] / device.bytes_per_s
                total += Seconds(takes, {}, takes)
            sums.add(instruction.into)
        else:
            raise CompileError(f"the cost model does not know the instruction {instruction.op} of the schedule")
    return total


def rank_bytes(program: Program) -> int:
    """Bytes of a rank's memory at the peak of a call: what is there all along (parameters, state, inputs), and what is made."""
    kept = sum(memory.port_bytes(port, sizes(program)) for port in program.inputs if port.kind in memory.KEPT)
    return kept + memory.peak(program).total
