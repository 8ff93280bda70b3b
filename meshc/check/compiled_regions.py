"""Faults of compiled regions: lines that cannot be compiled, regions that are not contiguous, regions for the backend eager.

    with region(1):
        r: "f32[8]" = all_reduce(x, ["dp"], "sum")      refused: a collective
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from meshc import ir
from meshc.ir.regions import blocks, microbatch_integers, region_of, why_alone
from meshc.program.program import PlainProgram


def faults(program: PlainProgram) -> Iterator[tuple[str, str, str]]:
    """(stage, value, message) for every line that is in a wrong region."""
    for stage in program.stages.values():
        if program.backend == "eager":
            inside = [node for node in stage.graph.nodes if region_of(node) is not None]
            if inside:
                why = f"it is in region {region_of(inside[0])}, but the program is for the backend eager, which compiles none"
                yield stage.name, inside[0].name, why
            continue
        yield from ((stage.name, node.name, why) for node, why in _wrong(stage.graph))


def _wrong(graph: Graph) -> Iterator[tuple[Node, str]]:
    varying, seen = microbatch_integers(graph), set()
    for number, nodes in blocks(node for node in graph.nodes if node.op == "call_function"):
        if number is not None and number in seen:
            yield nodes[0], f"it is in region {number}, which has ended above: the lines of a region stand together"
        seen.add(number)
        for node in nodes:
            why = why_alone(node, varying)
            if number is not None and why:
                yield node, f"it is in region {number}, and {why}: it runs by itself"
            if ir.is_getitem(node) and region_of(node.all_input_nodes[0]) != number:
                yield node, f"it takes apart what {node.all_input_nodes[0]} makes, and they are not in one region"
