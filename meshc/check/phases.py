"""Faults of phases (forward, backward, update): lines that read a value of a later phase.

The side table gives the phase of each line; a line added by hand, which the table does not have, takes the latest phase of its operands.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from meshc import ir
from meshc.ir import PHASES, Source
from meshc.program.program import Stage
from meshc.text.allowed_operators import spelling


def faults(stage: Stage) -> Iterator[tuple[str, str]]:
    """(value, message) for every line that reads a value of a later phase."""
    phase: dict[Node, int] = {}
    for node in stage.graph.nodes:
        if node.op != "call_function":
            continue
        read = {one: phase[one] for one in node.all_input_nodes if one in phase}
        latest = max(read, key=lambda one: read[one], default=None)
        told = ir.records(node)[0]
        phase[node] = PHASES.index(told.phase)
        if latest is None or read[latest] <= phase[node]:
            continue
        if told.phase == PHASES[0] and told.source == Source() and not told.reason:
            phase[node] = read[latest]
            continue
        what = f"it is of {told.phase} and reads {latest}, which is made in {PHASES[read[latest]]}"
        yield node.name, f"{node.name} = {spelling(node.target)}(...): {what}"
