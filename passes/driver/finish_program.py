"""Final program of a compilation, with its notes and metadata."""

from __future__ import annotations

from dataclasses import replace

from meshc.ir import calls
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.place import axis_flops
from meshc.program.program import Info, PlainProgram
from meshc.text.allowed_operators import refusal, spelling


def finish(lowered: LoweredProgram) -> PlainProgram:
    """The program that the phases have come to."""
    request, placed = lowered.request, lowered.placed
    model = lowered.model
    return replace(
        lowered.as_program(),
        notes=[*lowered.notes, *_unsavable_notes(lowered)],
        dynamic=placed.traced.dynamic,
        constraints=placed.traced.constraints,
        info={
            "output_paths": model.output_tree.paths(), "random_calls": model.random_calls,
            "inputs": request.inputs, "outputs": request.outputs,
            "work": [row.plain() for row in axis_flops.with_divided(axis_flops.account(placed), lowered.divided)],
            **({"batch_mix": request.batch_mix} if lowered.parts is not None else {}),
            **_pipeline_info(lowered),
        },
    )  # fmt: skip


def _pipeline_info(lowered: LoweredProgram) -> Info:
    """What compiling a pipeline again takes; of a function the schedule that it has made."""
    request, pipeline = lowered.request, lowered.pipeline
    if pipeline is None:
        return {}
    given = request.options.pipeline
    made = given.schedule if given.schedule is None or isinstance(given.schedule, str) else str(pipeline.schedule)
    asked: Info = {"schedule": made, "pp_splits": list(given.splits or ())}
    if given.stages_per_rank is not None:
        asked["stages_per_rank"] = given.stages_per_rank
    return asked


def _unsavable_notes(lowered: LoweredProgram) -> list[str]:
    """A note for each operator that a saved program may not name."""
    targets = {node.target for stage in lowered.stages.values() for node in calls(stage.graph)}
    why = "is no operator that a saved program may name: this one runs here and cannot be saved"
    return [f"{name} {why}" for name in sorted(spelling(target) for target in targets if refusal(target) is not None)]
