"""Refusal of pipelines where backward would read a sum over all microbatches too early, or outside the stage that computes the sum.

    gpipe   rank 1:  F0 F1 F2 F3 B3 B2 B1 B0       sum:chosen has part:chosen of all microbatches before B3 reads it
    1f1b    rank 1:  F0 B0 F1 B1 ..                B0 would read a sum to which F1 adds later: refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from meshc.errors import CompileError, ScheduleError
from meshc.ir.keys import is_a, name_of
from meshc.passes.stages.stage_assignment import FORWARD, Half
from meshc.pipelining.schedule import Action
from meshc.program.accumulate import ADDED, whole_of
from meshc.program.program import Stage

ADVICE = (
    '\n  what to do: Options(pipeline=Pipelining(schedule="gpipe")), which does; microbatches=1; or a mesh without pp, where forward runs '
    "twice instead"
)


def reads_sums(each: Stage) -> bool:
    return any(is_a(key, *ADDED) for key in each.inputs)


def refuse_early_backward(name: str, actions: Sequence[Sequence[Action]]) -> None:
    """Raises ScheduleError unless each stage's forwards all run before its first backward."""
    for items in actions:
        for stage in {item.stage for item in items}:
            forwards = [item.op == FORWARD for item in items if item.stage == stage]
            if forwards != sorted(forwards, reverse=True):
                raise ScheduleError(
                    f"{name}: backward reads sums over the whole batch (as the gradient of a load-balancing loss does), and this schedule "
                    f"does not run all forwards of stage {stage} before its first backward{ADVICE}"
                )


def refuse_sums_of_other_stages(stages: Sequence[Stage], made: Mapping[str, tuple[Node, Half]]) -> None:
    """Raises CompileError if a stage reads a sum that another stage computes. `made`: node and half by key of a part."""
    halves = {whole[1]: half for key, (_, half) in made.items() if (whole := whole_of(key))}
    for stage in stages:
        for key in stage.inputs:
            if is_a(key, *ADDED) and (halves[key].op != FORWARD or stage.name != f"backward_{halves[key].stage}"):
                raise CompileError(
                    f"{stage.name} reads the sum over the whole batch of {name_of(key)}, which stage {halves[key].stage} makes\n"
                    "  what to do: Options(pipeline=Pipelining(splits=...)) that leave both to one stage, microbatches=1, or a mesh "
                    "without pp; if it is the scale of a precision line, `float8 block` or `float8 row, gradients in bf16`"
                )
