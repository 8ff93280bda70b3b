"""Result of the pass `partition`: the per-rank graph as one stage that each rank runs, after the choice of turns and zigzag order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from meshc.cost.devices import devices_of
from meshc.ir.sharding import local_shape
from meshc.ir.spmd import MICROBATCH
from meshc.passes.partition.partition import Partitioner
from meshc.passes.partition.turn_choice import choose_turns
from meshc.passes.phases.compilation_phase import CompilationPhase, phase_fields
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.place.zigzag_values import assign_zigzag
from meshc.passes.trace import mean_of_parts
from meshc.passes.trace.set_compute import notes_on_narrow_sums
from meshc.program.program import Port, Stage

SHARE = 0.5
"""Share of memory for parameters, state, whole parameters and whole gradients; activations need the rest."""


def gathers_once(phase: CompilationPhase, inputs: Sequence[Port]) -> bool:
    """Whether a pipeline's stages keep their parameters gathered, by the memory that this is expected to take."""
    axis = phase.mesh.pipeline_axis
    if axis is None or MICROBATCH not in phase.sizes or not phase.request.gather_once:
        return False
    if any(port.storage != "device" for port in inputs if port.kind == "parameter"):  # offloaded: on the device only while it is read
        return False
    stored = whole = 0.0
    for port in inputs:
        if port.kind in ("parameter", "state") and port.sharding is not None:
            stored += prod(local_shape(port.sharding, phase.sizes)) * port.dtype.itemsize
            whole += 2 * prod(port.shape) * port.dtype.itemsize if port.kind == "parameter" else 0
    budget = phase.request.options.budget or devices_of(phase.mesh).least_memory()
    return (stored + whole) / axis.size <= SHARE * budget


def make_main_stage(placed: PlacedModel) -> LoweredProgram:
    placed = choose_turns(placed)
    joint = placed.joint
    inputs, cut = (joint.inputs, {}) if placed.parts is None else mean_of_parts.cut_inputs(joint.inputs, placed.parts)
    wants = [port.sharding for port in joint.outputs if port.sharding is not None]
    guarded = placed.mesh.device_type if placed.request.options.debugging.check_indices else None
    late = () if placed.chunked is None else placed.chunked.nodes
    assignment, once = assign_zigzag(placed.require_assignment(), joint.graph), gathers_once(placed, joint.inputs)
    partitioner = Partitioner(joint.graph, assignment, inputs, wants, cut, placed.traced.dynamic, once, guarded, late)
    stage = Stage("main", partitioner.build_graph(), tuple(port.key for port in inputs), tuple(port.key for port in joint.outputs))
    lowered = LoweredProgram(
        **phase_fields(placed), placed=placed, model=placed.traced.model, stages={"main": stage}, inputs=inputs, outputs=joint.outputs
    )
    return lowered.with_notes(*notes_on_narrow_sums(stage.graph))
