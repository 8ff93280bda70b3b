"""Pipeline stages that recompute values in backward, on ranks that would exceed their memory budget.

    cuts 3, 7    rank 0 holds 9.1 MB of 8:       saves 1.1 MB less: 8.2 MB   ->   1.4 MB less: 7.9 MB, 1.30 ms
    cuts 2, 7    as rank 0 has more to do now:                                    1.2 MB less: 7.8 MB, 1.24 ms

A rank saves less for backward by the bytes that it exceeds the budget (`passes/memory/stage_trades.py`). Recomputed values take memory too,
so the bytes are predicted again, and less is saved in each round; in the last one as little as possible. Recompute takes time, on some
ranks more than on others: where other cuts are faster then, the same is done for these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from meshc.frontend.faults import phase as part
from meshc.passes import pipeline
from meshc.passes.driver.pass_history import PassHistory
from meshc.passes.memory.recompute import settled_values
from meshc.passes.memory.stage_trades import StageTrades
from meshc.passes.pass_runner import run_pass, run_passes
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.stages.attempt import Refusal
from meshc.passes.stages.cut_stages import UncutProgram
from meshc.passes.stages.pipeline_memory import MemoryNeed
from meshc.passes.stages.pipeline_shape import PipelineShape

ROUNDS: Final = 3

Fitting = TypeVar("Fitting")


@dataclass
class StageRecomputation(Generic[Fitting]):
    """
    step    as `recompute` left it, from which `uncut` has the microbatches;  heard  the passes that led there
    budget  bytes of a rank
    judged  returns the result of a shape, given the number of values recomputed for it
    """

    step: LoweredProgram
    uncut: UncutProgram
    heard: PassHistory
    budget: int
    judged: Callable[[UncutProgram, PipelineShape, PassHistory, int], Fitting | Refusal | MemoryNeed]

    def best(self, shape: PipelineShape, need: MemoryNeed) -> list[Fitting]:
        """Programs that fit of `shape`, which needs too much, and of its cuts that are faster with recompute, if there are others."""
        found, left = self._of(shape, need)
        if isinstance(found, Refusal | MemoryNeed):
            return []
        other = next((one for one, _ in left.shapes.can if one.name == shape.name), shape)
        if other.cuts == shape.cuts:
            return [found]
        whole = self.judged(self.uncut, other, self.heard.copy(), 0)
        again = self._of(other, whole)[0] if isinstance(whole, MemoryNeed) else whole
        return [found, *([] if isinstance(again, Refusal | MemoryNeed) else [again])]

    def _of(self, shape: PipelineShape, need: MemoryNeed) -> tuple[Fitting | Refusal | MemoryNeed, UncutProgram]:
        """The first answer that is no MemoryNeed, or the answer of the last round; and the program that was cut."""
        stages = StageTrades(self.step, self.uncut.places(shape), settled_values(self.step))
        kept, fewest = stages.most, stages.least
        most: dict[int, int] = {}
        answer: Fitting | Refusal | MemoryNeed = need
        uncut = self.uncut
        for turn in range(ROUNDS):
            over = {at: held - self.budget for at, held in enumerate(need.ranks) if held > self.budget and kept[at] > fewest[at]}
            if not over:
                break
            for rank, excess in over.items():
                less = max(excess, (kept[rank] - fewest[rank]) // ROUNDS)
                kept[rank] = most[rank] = fewest[rank] if turn == ROUNDS - 1 else max(fewest[rank], kept[rank] - less)
            step, again = stages.with_kept_bytes(most)
            heard = self.heard.before_pass(pipeline.RECOMPUTE.name)
            uncut = self._uncut(step, heard)
            answer = self.judged(uncut, shape, heard, again)
            if not isinstance(answer, MemoryNeed):
                break
            need = answer
        return answer, uncut

    def _uncut(self, step: LoweredProgram, heard: PassHistory) -> UncutProgram:
        recomputed = run_pass(replace(pipeline.RECOMPUTE, run=lambda _: step), self.step, heard.hook)
        lowered = run_passes(pipeline.PARTS, recomputed, heard.hook)
        with part(f"the pass {pipeline.STAGES.name}"):
            return UncutProgram(lowered)
