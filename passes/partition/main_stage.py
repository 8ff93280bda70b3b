"""The program's one stage, in which each rank runs everything; later passes cut it."""

from __future__ import annotations

from meshc.passes.partition.partition import partition
from meshc.passes.phases.draft import Draft
from meshc.passes.stages.gather_once import gathers_once
from meshc.passes.trace import parts
from meshc.program.program import Stage


def make_main_stage(draft: Draft) -> Draft:
    assert draft.assignment is not None
    wants = [port.sharding for port in draft.outputs]
    cut = parts.cut_inputs(draft) if draft.parts is not None else {}
    known = [want for want in wants if want is not None]
    guarded = draft.mesh.device_type if draft.request.check_indices else None
    graph = partition(draft.the_graph(), draft.assignment, draft.inputs, known, cut, draft.dynamic, gathers_once(draft), guarded)
    stage = Stage("main", graph, tuple(port.key for port in draft.inputs), tuple(port.key for port in draft.outputs))
    draft.stages = {"main": stage}
    return draft
