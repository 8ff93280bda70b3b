"""Table rows of a program's copies between device and host, for its summary."""

from __future__ import annotations

from collections import Counter

from meshc import ir
from meshc.cost import peak_memory
from meshc.ir import PHASES, spmd
from meshc.program.program import PlainProgram

HEADERS = ["phase", "copy", "count", "bytes/rank", "largest", "said by"]


def rows_of(program: PlainProgram) -> list[tuple[str, str, int, int, int, str]]:
    """(phase, copy, runs per call, total bytes on a rank, bytes of the largest, plan line), in the order of the phases."""
    runs = peak_memory.runs(program)
    count: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[tuple[str, str, str]] = Counter()
    largest: dict[tuple[str, str, str], int] = {}
    for stage in program.stages.values():
        for node in stage.graph.nodes:
            if spmd.is_host_copy(node.target):
                one = ir.record(node)
                key = (one.phase, "to the host" if node.target is spmd.to_host else "from the host", one.reason)
                size = ir.local_bytes(one)
                count[key] += runs[stage.name]
                moved[key] += runs[stage.name] * size
                largest[key] = max(largest.get(key, 0), size)
    ordered = sorted(count, key=lambda key: (PHASES.index(key[0]), key[1], key[2]))
    return [(phase, copy, count[key], moved[key], largest[key], why) for key in ordered for phase, copy, why in [key]]
