"""Overlap: what a choice takes if all communication is hidden that can be, an estimate of what the clock will say.

    computing      |fwd ......|bwd ...............|adam|         gathers of stored parameters and reductions of gradients run beside it:
    hidden            |gather|  |reduce_scatter|                 what they take counts as far as it exceeds the computing, or as far as
                                                                 computing loses by it (`contention` of the device)
    exposed        what operators wait for: activations that change their split, outputs, parameters gathered after their update

The objective of a search counts everything; of two choices that cost the same by it, one may hide what the other waits for. So there is a
second objective, which counts what can be hidden for a part of its price, and the clock decides between the two answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from meshc.passes.planner.model import Group, Leg, Model

HIDDEN: Final = 0.1
"""What counts at least in the second objective of what can be hidden: of two plans that hide all, the one that sends less is better
still."""


def hiding(model: Model, part: float = HIDDEN) -> Model:
    """The second objective, what can be hidden counting for this part of its price, or for what computing loses by it if that is more.

    For none, its bound is one of `overlapped_seconds` and of the clock's: nothing costs more beside computing than apart from it there.
    """
    lost = model.operators.device.contention
    part = max(part, lost) if part else min(lost, 1.0)
    groups = [
        replace(group, legs=tuple(replace(leg, price=leg.price * part) if _hides(model, group, leg) else leg for leg in group.legs))
        for group in model.groups
    ]
    return replace(model, groups=groups)


def overlapped_seconds(model: Model, pick: Sequence[int]) -> float:
    computing = float(sum(own[option] for own, option in zip(model.own, pick, strict=True)))
    hidden = exposed = 0.0
    for group in model.groups:
        lies = int(group.given[pick[group.maker]])
        paid: dict[tuple[int, str], list[Leg]] = {}
        for leg in group.legs:
            wants = int(leg.forms[pick[leg.reader]])
            paid.setdefault((wants, leg.phase if leg.gathers[lies, wants] else ""), []).append(leg)
        whole = model.between(group, pick)
        price = sum(float(legs[0].price[lies, wants]) for (wants, _), legs in paid.items())
        aside = sum(
            float(legs[0].price[lies, wants]) for (wants, _), legs in paid.items() if any(_hides(model, group, leg) for leg in legs)
        )
        share = aside / price if price else 0.0
        hidden += whole * share
        exposed += whole * (1 - share)
    return exposed + max(computing + model.operators.device.contention * hidden, hidden)


def _hides(model: Model, group: Group, leg: Leg) -> bool:
    """Of a stored parameter on its way to operators, and of a gradient on its way to its norm and its update."""
    maker = model.decision(group.maker).key
    stored = isinstance(maker, tuple) and maker[0] == "parameter"
    return stored or (leg.phase == "update" and group.values[0].phase == "backward")
