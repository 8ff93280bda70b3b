"""What the last pass has left, as a program."""

from __future__ import annotations

from typing import Any

from meshc.ir import calls
from meshc.passes.phases.draft import Draft
from meshc.passes.place import work
from meshc.program.program import Program
from meshc.text.allowed import refusal, spelling


def finish(draft: Draft) -> Program:
    """The program that a draft has become after the last pass."""
    request = draft.request
    assert draft.plan is not None
    draft.notes += _unlisted(draft)
    return Program(
        stages=draft.stages,
        mesh=request.mesh,
        plan=draft.plan,
        inputs=tuple(draft.inputs),
        outputs=tuple(draft.outputs),
        schedule=draft.schedule,
        constants=draft.constants,
        axis_sizes=draft.sizes,
        microbatches=request.count,
        mode="step" if request.train else ("autograd" if request.grad else "forward"),
        notes=draft.notes,
        dynamic=draft.dynamic,
        constraints=draft.constraints,
        pipeline=draft.pipeline,
        backend=request.backend,
        info={
            "output_paths": draft.output_tree.paths() if draft.output_tree else [], "random_calls": draft.random_calls,
            "inputs": request.inputs, "outputs": request.outputs,
            "work": [row.plain() for row in work.account(draft)],
            **({"batch_mix": request.batch_mix} if draft.parts is not None else {}),
            **_pipeline_asked(draft),
        },
    )


def _pipeline_asked(draft: Draft) -> dict[str, Any]:
    """What compiling a pipeline again takes; of a function the schedule that it has made."""
    request, pipeline = draft.request, draft.pipeline
    if pipeline is None:
        return {}
    made = request.schedule if request.schedule is None or isinstance(request.schedule, str) else str(pipeline.schedule)
    each = {"stages_per_rank": request.stages_per_rank} if request.stages_per_rank is not None else {}
    return {"schedule": made, "pp_splits": list(request.pp_splits), **each}


def _unlisted(draft: Draft) -> list[str]:
    """A note for each operator that a saved program may not name."""
    targets = {node.target for stage in draft.stages.values() for node in calls(stage.graph) if refusal(node.target) is not None}
    why = "is no operator that a saved program may name: this one runs here and cannot be saved"
    return [f"{name} {why}" for name in sorted(map(spelling, targets))]
