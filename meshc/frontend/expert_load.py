"""Load of routed experts in a training step: tokens per expert and dropped choices of each layer, in `program.metrics["experts"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from meshc.frontend.train_step import DROPPED, ROUTED


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """The load of one layer's experts in the last step, over the whole batch.

    tokens   [experts], int64: how many tokens have chosen each expert
    dropped  a number, int64: choices beyond the capacity (`Options(experts=Experts(capacity=))`); None: there is no capacity
    """

    tokens: Tensor
    dropped: Tensor | None = None

    @property
    def imbalance(self) -> float:
        """Tokens of the most chosen expert over the mean per expert: from 1 to the number of experts."""
        return float(self.tokens.max()) * self.tokens.numel() / max(float(self.tokens.sum()), 1.0)


def with_loads(metrics: Mapping[str, Tensor]) -> dict[str, object]:
    """A step's metrics, with those of experts as `ExpertLoad`s under "experts", by the path of their module."""
    found: dict[str, object] = {name: value for name, value in metrics.items() if not name.startswith((ROUTED, DROPPED))}
    paths = [name.removeprefix(ROUTED) for name in metrics if name.startswith(ROUTED)]
    if paths:
        found["experts"] = {path: ExpertLoad(metrics[ROUTED + path], metrics.get(DROPPED + path)) for path in paths}
    return found
