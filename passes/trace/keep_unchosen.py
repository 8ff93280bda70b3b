"""Keep unchosen: an expert that no token has chosen is left as it is by an update, with all its state, as torch.optim leaves it.

    w, m, v, t = adam(w1, ..)        becomes        w = where(routed[3] > 0, w, w1), and so m, v, t

Where a model's code does not call such an expert, its parameters have no gradient on one device, and an optimizer passes them over: no
decay, no step counted. A program has zeros there. How often each expert is chosen, over the whole batch and all microbatches, is in the
graph already (`count_experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce

import torch
from torch.fx import Node

from meshc.frontend.train_step import ROUTED
from meshc.ir import record
from meshc.program.program import Port

aten = torch.ops.aten


class Unchosen:
    """
    places  parameters of such experts: (path of a module that loops over it, number)
    kept    what the graph gives so far, counts among it
    """

    def __init__(self, call: Callable[..., Node], places: Mapping[str, tuple[tuple[str, int], ...]], kept: list[tuple[Port, Node]]) -> None:
        self.call, self.places = call, places
        metrics = [(port.name, node) for port, node in kept if port.kind == "metric"]
        self.counts = {name.removeprefix(ROUTED): node for name, node in metrics if name.startswith(ROUTED)}
        self.chosen: dict[tuple[tuple[str, int], ...], Node] = {}

    def kept(self, name: str, old: Node, new: Node, state: Mapping[str, Node], after: Mapping[str, Node]) -> tuple[Node, dict[str, Node]]:
        """A parameter and its state behind an update."""
        places = self.places.get(name, ())
        if not places or new is old or any(path not in self.counts for path, _ in places):
            return new, dict(after)
        if places not in self.chosen:
            found = [self.call(aten.select.int, self.counts[path], 0, number) for path, number in places]
            self.chosen[places] = self.call(aten.gt.Scalar, reduce(partial(self.call, aten.add.Tensor), found), 0)
        chosen = self.chosen[places]
        slots = {slot: self._where(chosen, value, state[slot]) for slot, value in after.items()}
        return self._where(chosen, new, old), slots

    def _where(self, chosen: Node, new: Node, old: Node) -> Node:
        assert record(new).dtype == record(old).dtype
        return new if new is old else self.call(aten.where.self, chosen, new, old)
