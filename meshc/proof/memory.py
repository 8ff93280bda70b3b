"""Memory that values share, in a proof: nothing is written over that is still to be read.

    flat: "f32[68]; its parts inside" = aten.cat([a, b])                 a and b are made in the memory of flat
    r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")     from here on flat, a and b, and views of them, are gone

Updates in place are looked at by the checks of texts (`meshc/check/overwrites.py`), which also say what may be a view of what.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch.fx import Node

from meshc.check import overwrites
from meshc.check.stage import may_view
from meshc.ir.sharing import OVER_OPERAND, PARTS_INSIDE, sharing_of
from meshc.program.program import Stage


def memory_faults(stage: Stage) -> Iterator[tuple[Node, str]]:
    """(line, message) where a line reads what has been written over."""
    memory = overwrites.memories(stage, may_view)
    inside: dict[Node, frozenset[str]] = {}
    writers: dict[str, list[Node]] = defaultdict(list)
    made: dict[Node, dict[str, int]] = {}
    """Value -> its places in memory, each with how often that had been written over when the value was made."""
    for node in stage.graph.nodes:
        for operand in node.all_input_nodes:
            by = next((writers[place][count] for place, count in made[operand].items() if len(writers[place]) > count), None)
            if by is not None:
                yield node, f"it reads {operand}, in whose memory {by} has been written"
                break
        words = sharing_of(node)
        if PARTS_INSIDE in words:
            inside[node] = frozenset().union(*(memory[part] for part in node.all_input_nodes))
        if OVER_OPERAND in words:
            operand = node.all_input_nodes[0]
            for place in memory[operand] | inside.get(operand, frozenset()):
                writers[place].append(node)
        made[node] = {place: len(writers[place]) for place in sorted(memory.get(node, ()))}
    named = {node.name: node for node in stage.graph.nodes}
    last = next(reversed(stage.graph.nodes))
    for name, why in overwrites.faults(stage, may_view):
        yield named.get(name, last), why
