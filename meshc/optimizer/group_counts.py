"""State slots for a parameter group's numbers that a step itself updates: a step count, a sum of weights, the largest rate so far.

    group["k"] = k + 1                                         as schedule-free optimizers count

In a program each parameter of the group has a copy of the number in its state; the group's entry is updated after each call and read before
each call, so that loaders and users may write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from meshc.optimizer.spec import HIDDEN, Slot

GROUP: Final = HIDDEN + "group."
"""Prefix of the number's name in the state of a parameter."""


class WriteTrackingGroup(dict[str, Any]):
    """A parameter group that records the names of entries which were set, in `written`."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.written: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)


def slots(names: Iterable[str], group: dict[str, Any]) -> tuple[Slot, ...]:
    """State slots for the numbers `names`, with the values of `group` as initial values."""
    return tuple(Slot(GROUP + name, "scalar", (), torch.float64, float(group[name]), True) for name in sorted(names))


def number_of(slot: Slot) -> str | None:
    """Name of the group's number that `slot` holds; None if the slot is state of the parameter."""
    return slot.name.removeprefix(GROUP) if slot.name.startswith(GROUP) else None
