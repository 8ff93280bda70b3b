"""Table rows of a program's copies between device and host, for its summary."""

from __future__ import annotations

from collections import defaultdict

from meshc import ir
from meshc.cost import peak_memory
from meshc.ir import PHASES, spmd
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text

HEADERS = ["phase", "copy", "count", "bytes/rank", "largest", "said by"]


def rows_of(program: PlainProgram) -> list[tuple[str, str, str, str, str, str]]:
    """A row of HEADERS for all copies of one phase and direction that one line of the plan says, in the order of the phases."""
    runs = peak_memory.runs(program)
    sizes: dict[tuple[int, str, str], list[int]] = defaultdict(list)
    for stage in program.stages.values():
        for node in stage.graph.nodes:
            if spmd.is_host_copy(node.target):
                one = ir.record(node)
                key = PHASES.index(one.phase), "to the host" if node.target is spmd.to_host else "from the host", one.reason
                sizes[key] += [ir.local_bytes(one)] * runs[stage.name]
    return [
        (PHASES[phase], copy, str(len(each)), bytes_text(sum(each)), bytes_text(max(each, default=0)), why)
        for (phase, copy, why), each in sorted(sizes.items())
    ]
