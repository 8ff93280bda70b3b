"""Memory sharing: marks on parts inside a concatenation, results over their operand, values that stay in place between calls.

    a: "f32[64]" = aten.reshape(g1, [-1])                     a, and g1 below it, and b:
    b: "f32[4]" = aten.reshape(g2, [-1])
    flat: "f32[68]" = aten.cat([a, b])              becomes   flat: "f32[68]; its parts inside, kept" = aten.cat([a, b])
    r: "f32[68]" = all_reduce(flat, ["dp"], "sum")            r: "f32[68]; over its operand" = all_reduce(flat, ["dp"], "sum")

A value that nothing else reads may be written over, and so may a cache's buffer that a call passes in (`writes_in_place`). A value that
shares memory with no result of the stage may keep its memory between calls: fresh pages cost more than the writes to them.
`meshc/program/packing.py` decides where each is allowed. In a region a `cat` is Inductor's, which also computes the parts inside the
result, and frees the memory.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from meshc.cost import peak_memory
from meshc.frontend.libraries.stock_caches import LENGTH
from meshc.ir import spmd
from meshc.ir.graph import copy_graph
from meshc.ir.sharing import KEPT, OVER_OPERAND, PARTS_INSIDE, set_sharing
from meshc.passes.lower.early_updates import move_updates_early
from meshc.passes.lower.schedule_collectives import start_reductions
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.program.packing import adds_over, may_hold_its_parts, may_overwrite, may_stay, stays, writes_in_place
from meshc.program.program import Instruction, Stage


def share_memory(lowered: LoweredProgram) -> LoweredProgram:
    """Marks each value with the memory that it shares; values do not change."""
    has_cache = LENGTH in lowered.request.kwargs
    return replace(lowered, stages={name: share_stage_memory(stage, has_cache) for name, stage in lowered.stages.items()})


def share_stage_memory(stage: Stage, has_cache: bool = False) -> Stage:
    """A copy of the stage with the marks. `has_cache`: its call passes a cache in, whose buffers are written in place."""
    stage = replace(stage, graph=copy_graph(stage.graph))
    written = writes_in_place(stage) if has_cache else set()
    for node in stage.graph.nodes:
        set_sharing(node, (OVER_OPERAND,) if node in written else possible_sharing(node))
    return stage


def rank_bytes_when_lowered(lowered: LoweredProgram) -> peak_memory.RankBytes:
    """Predicted bytes of the rank that needs most, for a program of one stage before this room's passes: with reductions and updates where
    they will be, unless there are microbatches, and with memory shared as it will be."""
    (stage,) = lowered.stages.values()
    if lowered.request.train and lowered.request.microbatches == 1:
        stage = replace(stage, graph=copy_graph(stage.graph))
        for reduction in (spmd.reduce_scatter, spmd.all_reduce):
            start_reductions(stage.graph, reduction)
        move_updates_early(stage.graph)
    alone = replace(lowered, stages={stage.name: stage}, schedule=(Instruction("run", stage.name),))
    return peak_memory.peak_rank(alone.as_program(), possible_sharing)


def possible_sharing(node: Node) -> tuple[str, ...]:
    """The marks of the memory that a value can share."""
    if may_hold_its_parts(node):
        return (PARTS_INSIDE, KEPT) if may_stay(node) else (PARTS_INSIDE,)
    if adds_over(node) or (node.target is spmd.all_reduce and may_overwrite(node)):
        return (OVER_OPERAND,)
    return (KEPT,) if stays(node) else ()
