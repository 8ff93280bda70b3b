"""The program's one stage as it leaves partition: each rank runs everything, and later passes cut it."""

from __future__ import annotations

from meshc.passes.partition.partition import partition
from meshc.passes.partition.turn_choice import choose_turns
from meshc.passes.phases.compilation_phase import phase_fields
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.zigzag_values import assign_zigzag
from meshc.passes.stages.gather_once import gathers_once
from meshc.passes.trace import mean_of_parts
from meshc.program.program import Stage


def make_main_stage(placed: PlacedModel) -> LoweredProgram:
    placed = choose_turns(placed)
    joint = placed.joint
    inputs, cut = (joint.inputs, {}) if placed.parts is None else mean_of_parts.cut_inputs(joint.inputs, placed.parts)
    wants = [port.sharding for port in joint.outputs if port.sharding is not None]
    guarded = placed.mesh.device_type if placed.request.check_indices else None
    late = () if placed.chunked is None else placed.chunked.nodes
    assignment, once = assign_zigzag(placed.require_assignment(), joint.graph), gathers_once(placed, joint.inputs)
    graph = partition(joint.graph, assignment, inputs, wants, cut, placed.traced.dynamic, once, guarded, late)
    stage = Stage("main", graph, tuple(port.key for port in inputs), tuple(port.key for port in joint.outputs))
    return LoweredProgram(
        **phase_fields(placed), placed=placed, model=placed.traced.model, stages={"main": stage}, inputs=inputs, outputs=joint.outputs
    )
