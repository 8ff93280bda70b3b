"""Fewest peak bytes of any choice, as a lower bound and a choice, for the error where nothing keeps a budget.

    weights of moments, 1 in all        the least weighted sum of bytes is a lower bound on peak bytes
    known choices                       the next weights maximize the least weighted sum over these (a matrix game: von Neumann, 1928)

Seconds do not count: a cost model of bytes alone is solved by the messages of the search (`dual_ascent.py`). Once these bring no new
choice, branch and bound looks for one with slightly fewer bytes than the best known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from meshc.passes.planner.cost_model import CostModel, Pick
from meshc.passes.planner.dual_ascent import DualAscent
from meshc.passes.planner.lagrangian import Lagrangian
from meshc.passes.planner.linear_program import solve_program
from meshc.passes.planner.memory_model import MemoryModel
from meshc.passes.planner.narrow_options import columns_of, decode_choices, options_by_class
from meshc.passes.planner.relaxation import BRANCHES, Allowance
from meshc.passes.planner.search_space import Floats, Numbers

ROUNDS: Final = 12
"""Most rounds of weights before each run of branch and bound."""
PROGRAMS: Final = 3
"""Most runs of branch and bound."""
SWEEPS: Final = 4
GIGA: Final = 1e9
"""Bytes are weighted as billions: tolerances of solvers are absolute."""
CLOSE: Final = 1e-3
"""Relative difference in bytes that is not looked for."""
PAIRS: Final = 2_000
NODES: Final = 20


@dataclass
class FewestBytes:
    """
    picks   known choices: bytes at each position;  bound  lower bound on the peak bytes of every choice
    """

    model: CostModel
    memory: MemoryModel
    left: Sequence[Numbers]
    allowed: Allowance = field(default_factory=Allowance)
    picks: dict[Pick, Floats] = field(default_factory=dict)
    bound: float = 0.0

    def __post_init__(self) -> None:
        groups = [
            replace(group, legs=tuple(replace(leg, price=np.zeros_like(leg.price)) for leg in group.legs)) for group in self.model.groups
        ]
        self.bytes = replace(self.model, own=[np.zeros_like(own) for own in self.model.own], groups=groups)
        self.moments: list[int] = []

    @property
    def best(self) -> Pick:
        return min(self.picks, key=lambda one: (self.picks[one].max(), one))

    @property
    def held_bytes(self) -> float:
        return float(self.picks[self.best].max())

    def note(self, pick: Pick) -> bool:
        """Adds `pick` to the known choices; returns whether it is new. Its peak moment has a weight from then on."""
        if pick in self.picks:
            return False
        self.picks[pick] = self.memory.walk(pick)
        moment = int(self.picks[pick].argmax())
        if moment not in self.moments:
            self.moments.append(moment)
        return True

    @property
    def is_close(self) -> bool:
        return self.held_bytes <= self.bound * (1 + CLOSE)

    def find(self) -> None:
        weights, ascent = [1.0], None
        for _ in range(PROGRAMS):
            ascent = self._sweep(weights, ascent)
            if self.is_close or not self._find_smaller(ascent):
                break
            weights = self._dearest_weights()

    def _sweep(self, weights: Sequence[float], ascent: DualAscent | None) -> DualAscent:
        """Messages at `weights`, then at those of `_dearest_weights`, while new choices appear."""
        for _ in range(ROUNDS):
            weighed = Lagrangian(self.bytes, self.memory, {at: one / GIGA for at, one in zip(self.moments, weights, strict=False)})
            ascent = DualAscent(weighed, self.left, ascent)
            for _ in range(SWEEPS):
                ascent.sweep()
            self.bound = max(self.bound, (ascent.lower_bound - weighed.budget_charge(0.0)) * GIGA)
            new = [self.note(pick) for pick in decode_choices(ascent, [self.best])]
            if self.is_close or not any(new):
                break
            weights = self._dearest_weights()
        assert ascent is not None, "there is a round"
        return ascent

    def _find_smaller(self, ascent: DualAscent) -> bool:
        """Whether branch and bound, over options of the fewest weighted bytes, finds a new choice of fewer bytes."""
        known, kept = ascent.weighed.seconds(self.best), options_by_class([self.best], ascent)
        columns, _ = columns_of(ascent, known, kept, self.moments, self.held_bytes * (1 - CLOSE), most=PAIRS)
        if not self.allowed.spend(columns, BRANCHES):
            return False
        pick, _ = columns.solve_integer(NODES)
        return pick is not None and self.note(pick)

    def _dearest_weights(self) -> list[float]:
        """Weights of the moments that maximize the least weighted bytes of the known choices."""
        count = len(self.moments)
        rows = [[*(-walked[self.moments] / GIGA), 1.0] for walked in self.picks.values()]
        bounds = [*[(0, None)] * count, (None, None)]
        found = solve_program([*[0.0] * count, -1.0], rows, [0.0] * len(rows), [[*[1.0] * count, 0.0]], [1.0], bounds=bounds)
        assert found is not None, "some choice weighs most"
        return [float(one) for one in found.x[:-1]]


def find_fewest_bytes(
    model: CostModel, memory: MemoryModel, left: Sequence[Numbers], known: Sequence[Pick], allowed: Allowance | None = None
) -> FewestBytes:
    """Fewest bytes over the options `left`, from the choices `known`; `allowed`: allowance of branch and bound."""
    found = FewestBytes(model, memory, left, allowed or Allowance())
    for pick in known:
        found.note(pick)
    found.moments = [int(found.picks[found.best].argmax())]
    found.find()
    return found
