"""Objectives with overlap: communication that can be hidden behind computing counts for a part of its price.

    computing      |fwd ......|bwd ...............|adam|         gathers of stored parameters and reductions of gradients run beside it:
    hidden            |gather|  |reduce_scatter|                 of what they take a part counts, or as much as computing loses by it
                                                                 (`contention` of the device)
    exposed        what operators wait for: activations that change their split, outputs, parameters gathered after their update

The objective of a search counts everything; of two choices that cost the same by it, one may hide what the other waits for. So there are
other objectives, which count what can be hidden for a part of its price, and the clock decides between the answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshc.passes.planner.cost_model import CostModel, Leg, ValueGroup

HIDDEN: Final = 0.1
"""What counts at the least of what can be hidden: of two plans that hide all, the one that sends less is better still."""


def with_hidden_communication(model: CostModel, part: float = HIDDEN) -> CostModel:
    """The objective in which what can be hidden counts for this part of its price, or for what computing loses by it if that is more.

    For none, its bound is one of the clock's: nothing costs more beside computing than apart from it there.
    """
    lost = model.operators.device.contention
    part = max(part, lost) if part else min(lost, 1.0)
    groups = [
        replace(group, legs=tuple(replace(leg, price=leg.price * part) if _hides(model, group, leg) else leg for leg in group.legs))
        for group in model.groups
    ]
    return replace(model, groups=groups)


def _hides(model: CostModel, group: ValueGroup, leg: Leg) -> bool:
    """Of a stored parameter on its way to operators, and of a gradient on its way to its norm and its update."""
    maker = model.decision(group.maker).key
    stored = isinstance(maker, tuple) and maker[0] == "parameter"
    return stored or (leg.phase == "update" and group.values[0].phase == "backward")
