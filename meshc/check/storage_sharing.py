"""Storage shared by values: no read of an overwritten value, and no result in memory kept between calls.

    flat: "f32[68]; its parts inside" = aten.cat([a, b])          refused where a line reads g1, which a flattens: it lies in flat's memory
    r: "f32[68]; over its operand" = all_reduce(flat, ...)        refused where a line reads flat beside it
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from meshc.ir.regions import region_of
from meshc.ir.sharing import KEPT, OVER_OPERAND, PARTS_INSIDE, sharing_of
from meshc.program.packing import escapes, may_hold_its_parts, may_overwrite, may_stay, writes_in_place
from meshc.program.program import Stage


def faults(stage: Stage) -> Iterator[tuple[str, str]]:
    """(value, what is wrong with it). The stage's lines are sound in themselves."""
    written = writes_in_place(stage)
    for node in stage.graph.nodes:
        for word in sharing_of(node):
            if not (word == OVER_OPERAND and node in written) and (why := _why_not(node, word)):
                yield node.name, f"{node.name}: {word}, but {why}"
                break


def _why_not(node: Node, word: str) -> str:
    if word == PARTS_INSIDE and not may_hold_its_parts(node):
        return "that is for a cat of vectors, each made by reshape(x, [-1]) of an x that an operator has made and nothing else reads"
    if word == OVER_OPERAND and not may_overwrite(node):
        what = "what an operator has just made, and what nothing else reads, whatever lies in its memory"
        return f"that is for an all-reduce of {what}; for an addition in no region to it; for an index_copy into an input that leaves so"
    if word == KEPT and escapes(node):
        return "it leaves the stage, or what lies in its memory does: the next call would write over a result"
    if word == KEPT and (region := region_of(node)) is not None:
        return f"it is in region {region}, whose memory is the compiler's"
    if word == KEPT and not may_stay(node):
        return "that is for a product that is only reduced in place, and for a cat that has its parts inside"
    if word == KEPT and may_hold_its_parts(node) and PARTS_INSIDE not in sharing_of(node):
        return "its parts are not inside: a cat makes fresh memory otherwise"
    return ""
