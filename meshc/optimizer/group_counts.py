"""Numbers of a parameter group that a step itself updates: a step count, a sum of weights, the largest rate so far.

    group["k"] = k + 1                                         as schedule-free optimizers count

In a program each parameter of the group has its own such number, among its state; the group's is brought up to date after each call, and
read before one, so that loaders and users may write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from meshc.optimizer.spec import HIDDEN, Slot

GROUP: Final = HIDDEN + "group."
"""What stands before the number's name in the state of a parameter."""


class Watched(dict[str, Any]):
    """A group that remembers which entries were set."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.written: set[str] = set()

    def __setitem__(self, name: str, value: Any) -> None:
        self.written.add(name)
        super().__setitem__(name, value)


def slots(names: Iterable[str], group: dict[str, Any]) -> tuple[Slot, ...]:
    """State for these numbers, which begin as the group has them."""
    return tuple(Slot(GROUP + name, "scalar", (), torch.float64, float(group[name]), True) for name in sorted(names))


def number_of(slot: Slot) -> str | None:
    """The group's number that a slot stands for."""
    return slot.name.removeprefix(GROUP) if slot.name.startswith(GROUP) else None
