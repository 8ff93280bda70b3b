"""Cost model with overlap: communication that can be hidden behind computing counts for a part of its price.

    computing      |fwd ......|bwd ...............|adam|         overlaps with gathers of stored parameters and reductions of gradients
    hidden            |gather|  |reduce_scatter|                 counts for a part of its price, or for the time by which it slows
                                                                 computing (`contention` of the device)
    exposed        all else: resharded activations, outputs, parameters gathered after their update

The plain objective counts all communication in full, so of two choices of equal cost one may hide what the other waits for. Other
objectives therefore count hidden communication for a part of its price, and the clock decides between their results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from meshc.passes.planner.cost_model import CostModel, Leg, ValueGroup

HIDDEN: Final = 0.1
"""Least part of the price of hidden communication: of two plans that hide all, the one that sends less is still better. (Of the 70 rows of
the plan tables 12 take a choice at a tenth or a half.)"""


def with_hidden_communication(model: CostModel, part: float = HIDDEN) -> CostModel:
    """The objective in which hidden communication counts for `part` of its price, or for the slowdown of computing if that is more.

    With `part` 0, its bound also holds for the clock, on which communication costs no more with overlap than without.
    """
    lost = model.operators.device.contention
    part = max(part, lost) if part else min(lost, 1.0)
    groups = [
        replace(group, legs=tuple(replace(leg, price=leg.price * part) if _hides(model, group, leg) else leg for leg in group.legs))
        for group in model.groups
    ]
    return replace(model, groups=groups)


def _hides(model: CostModel, group: ValueGroup, leg: Leg) -> bool:
    """Whether a leg can be hidden: a stored parameter on its way to operators, or a gradient on its way to its norm and its update."""
    maker = model.decision(group.maker).key
    stored = isinstance(maker, tuple) and maker[0] == "parameter"
    return stored or (leg.phase == "update" and group.values[0].phase == "backward")
