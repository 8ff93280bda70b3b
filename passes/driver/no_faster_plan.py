"""Pruning error: on this mesh no plan can be faster than a known one, so no program is compiled for it.

    dp=64,tp=8     140.2 ms by the clock
    dp=512         at best 152.0 ms by the model, if all is hidden behind computing that can be: not compiled
    pp=8,dp=8      at best 161.3 ms by its stages' estimate: not cut
"""

from __future__ import annotations

from typing import Final

from meshc.errors import PlanError

MARGIN: Final = 0.05
"""Relative excess of a bound, or an estimate, over the known seconds that rules a plan out: the clock merges updates and small messages
that the model counts separately."""
BY_MODEL: Final = "by the model, if all is hidden behind computing that can be"
BY_ESTIMATE: Final = "by the estimates of all candidates"
BY_STAGES: Final = "by what its stages are estimated to take"


class NoFasterPlan(PlanError):
    """`least_s`: lower bound of the seconds of any plan, by the source `by`; `beaten_s`: seconds of the known plan."""

    def __init__(self, least_s: float, beaten_s: float, by: str) -> None:
        super().__init__(f"at best {least_s * 1e3:.1f} ms {by}; a plan of {beaten_s * 1e3:.1f} ms is known")
        self.least_s, self.beaten_s, self.by = least_s, beaten_s, by
