"""The program's one stage as it leaves partition: each rank runs everything, and later passes cut it."""

from __future__ import annotations

from meshc.passes.partition.partition import partition
from meshc.passes.partition.turns import with_turns
from meshc.passes.phases.lowered import Lowered
from meshc.passes.phases.outset import carried
from meshc.passes.phases.placed import Placed
from meshc.passes.place.orders import in_orders
from meshc.passes.stages.gather_once import gathers_once
from meshc.passes.trace import parts
from meshc.program.program import Stage


def make_main_stage(placed: Placed) -> Lowered:
    placed = with_turns(placed)
    joint = placed.joint
    inputs, cut = (joint.inputs, {}) if placed.parts is None else parts.cut_inputs(joint.inputs, placed.parts)
    wants = [port.sharding for port in joint.outputs if port.sharding is not None]
    guarded = placed.mesh.device_type if placed.request.check_indices else None
    late = () if placed.chunked is None else placed.chunked.nodes
    assignment, once = in_orders(placed.decided(), joint.graph), gathers_once(placed, joint.inputs)
    graph = partition(joint.graph, assignment, inputs, wants, cut, placed.traced.dynamic, once, guarded, late)
    stage = Stage("main", graph, tuple(port.key for port in inputs), tuple(port.key for port in joint.outputs))
    return Lowered(
        **carried(placed), placed=placed, model=placed.traced.model, stages={"main": stage}, inputs=inputs, outputs=joint.outputs
    )
