"""Compiled request with its seconds by the clock and its bytes by liveness, for every search that compares requests.

    head whole        1905 ms by the clock    23.0 GB    the passes that led to it
    chunk lm_head: 8  1830 ms                 24.0 GB
    microbatches=3                                       refused: 3 does not divide the batch

Which requests are compiled, and in which order, is the searches' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

from meshc.cost import peak_memory
from meshc.cost.devices import devices_of
from meshc.cost.peak_memory import RankBytes, peak_rank
from meshc.cost.program_clock import program_seconds
from meshc.cost.stage_clock import Seconds, node_seconds
from meshc.ir import calls, records
from meshc.passes.driver.pass_history import PassHistory
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.stages.attempt import Refusal, attempt
from meshc.passes.stages.pipeline_memory import DoesNotFit

Lower: TypeAlias = Callable[[PlacedModel, Hook | None], LoweredProgram]
"""All passes after `factorize`."""
MARGIN: Final = 0.1
"""How far estimates of seconds, and of a change's bytes, may be off: with more, more is compiled. (Of gpt2-xl on 512 ranks 0.05, 0.1 and
0.15 take one plan, in 21, 21 and 28 CPU s; of Llama 8B on 8 one plan in 70. By the clock plans take 0.78 to 2.1 of their estimates.)"""
TRIES: Final = 3
"""Rounds of one question, each for fewer bytes, and answers to one that are compiled: choices, recipes, shapes of a pipeline. (Of
seven rows of the plan tables six compile one to three candidates, and one four.)"""


@dataclass(frozen=True)
class MeasuredProgram:
    """`left`: the program; `most`: bytes of the rank that needs most; `heard`: the passes that led to it, for a hook."""

    left: LoweredProgram
    most: RankBytes
    heard: PassHistory = field(default_factory=PassHistory)

    @property
    def held_bytes(self) -> int:
        return self.most.total

    @cached_property
    def took(self) -> Seconds:
        """Of a call, by the clock of the mesh's device."""
        return program_seconds(self.left.as_program())

    @property
    def seconds(self) -> float:
        return self.took.total

    @cached_property
    def recompute_s(self) -> float:
        """Seconds of recompute in a call, one operator after another; of a pipeline, for the stage with the most."""
        left, device, runs = self.left, devices_of(self.left.mesh).slowest(), peak_memory.runs(self.left.as_program())
        again = {name: [node for node in calls(stage.graph) if records(node)[0].again] for name, stage in left.stages.items()}
        return max(runs[name] * sum(node_seconds(node, left.mesh, device) for node in nodes) for name, nodes in again.items())

    def with_notes(self, *notes: str) -> MeasuredProgram:
        return replace(self, left=self.left.with_notes(*notes))


def measure(placed: PlacedModel, lower: Lower, heard: PassHistory | None = None) -> MeasuredProgram | Refusal:
    """The program of `placed` by `lower`, or the error of an impossible request. `heard`: where the passes are recorded."""
    heard = heard or PassHistory()
    left = attempt(lambda: lower(placed, heard.hook))
    return left if isinstance(left, Refusal) else MeasuredProgram(left, peak_rank(left.as_program()), heard)


def stages_that_need_least(refusal: Refusal) -> MeasuredProgram | None:
    """Of a pipeline without a candidate that fits, the stages that need least, as they were cut."""
    if not isinstance(refusal.error, DoesNotFit) or (cut := refusal.error.need.cut) is None:
        return None
    return MeasuredProgram(cut, refusal.error.need.most)
