"""Certificate of a found plan: its cost by the model, the lower bound, and the gap between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEFT_OUT: Final = (
    "computing and communicating at the same time, and collectives that travel together: the clock has them, the model does not",
    "regions that a backend compiles as one",
    "padding in messages, and microbatches: a step is priced as one",
    "windows of neighbouring tiles: letters that they tie are split as little as the plan says",
    "plans that treat layers of equal structure differently",
    "buckets, windows of gathers and memory that values share: the program's own walk has them",
)
"""Effects outside the cost model. The few best choices are priced again by the clock and the liveness walk, which have them."""


@dataclass(frozen=True)
class Certificate:
    """
    seconds  of the choice, by the cost model
    bound    lower bound on the seconds of every choice of the model
    held     peak bytes of a rank, by the model;  budget  limit on these, None without one
    classes  number of decision classes;  options  number of options of all classes together
    near     whether these are not all options but, for many axes, those that differ from an earlier plan along few axes
    """

    seconds: float
    bound: float
    held: float
    budget: float | None
    classes: int
    options: int
    near: bool = False

    @property
    def gap(self) -> float:
        """Largest part of the seconds that a better choice could save."""
        return max(0.0, 1.0 - self.bound / self.seconds) if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        within = "" if self.budget is None else f" within {self.budget / 1e9:.2f} GB"
        near = ", of many axes those near it" if self.near else ""
        return (
            f"{self.seconds * 1e3:.3f} ms by the model{within}, at best {self.bound * 1e3:.3f} ms: a gap of {self.gap:.2%} "
            f"over {self.classes} decisions with {self.options:,} options{near}"
        )
