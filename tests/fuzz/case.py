"""A case: one program, one mesh, one plan, and how it is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.sketch import Sketch, script


@dataclass(frozen=True)
class How:
    """What a compilation is asked for beside mesh and plan.

    microbatches  of a training step; with `mean_of_parts` the step is the mean of what each gives alone
    inputs        "local": each rank has its part of the batch
    reparse       what runs is what the program's own text says
    attention     "ring": keys pass round, "zigzag": in zigzag order wherever that can be; where they cannot pass the case is
                  refused, as its script is
    remat         what backward recomputes (`Options.remat`)
    """

    microbatches: int = 1
    mean_of_parts: bool = False
    inputs: str = "global"
    reparse: bool = False
    attention: str | None = None
    remat: str | None = None

    @property
    def parts(self) -> int:
        """Microbatches that are known when the program is traced."""
        return self.microbatches if self.mean_of_parts else 1

    @property
    def step(self) -> dict[str, int | str]:
        """Arguments of TrainStep."""
        if self.microbatches == 1:
            return {}
        return {"microbatches": self.microbatches, **({"batch_mix": "mean_of_parts"} if self.mean_of_parts else {})}


PLAIN = How()


@dataclass(frozen=True)
class Case:
    """`plan` by lines; `train`: with an optimizer's step, which a sketch with a loss and a parameter can have."""

    sketch: Sketch
    train: bool
    mesh: str
    plan: tuple[str, ...]
    how: How = PLAIN

    @property
    def size(self) -> int:
        """Steps, leaves and terms of the plan: what a reader of the case has to look at."""
        words = sum(len(line.replace(" > ", ", ").split(", ")) for line in self.plan if not line.endswith(": -"))
        return len(self.sketch.steps) + len(self.sketch.leaves) + words

    def script(self, title: str) -> str:
        """A file that shows the failure, as far as `meshc.verify` does: it reads no text, and gives every rank the whole batch."""
        how, plan = self.how, "\n".join(self.plan)
        return script(self.sketch, self.mesh, plan, title, how.step if self.train else None, how.inputs, how.attention, how.remat)
