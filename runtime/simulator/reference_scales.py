"""Delayed scales of a model on one device: the largest magnitudes of the steps before, by parameter and by what an operand is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch
from torch import Tensor

from meshc.ir.formats import ELEMENTS, Format, Role
from meshc.optimizer.spec import PEAKS


class DelayedScales:
    """`histories`: by the name of a state, its value, from the first step on."""

    def __init__(self) -> None:
        self.histories: dict[str, list[float]] = {}
        self._peaks: dict[str, tuple[float, int]] = {}
        """Of this step, with the number of steps that are kept."""

    def clear(self) -> None:
        self.histories.clear()
        self._peaks.clear()

    def scale(self, x: Tensor, role: Role, form: Format, name: str) -> Tensor:
        """The scale of an operand of the product with a parameter, of as many dims; notes its largest magnitude."""
        slot, peak = f"{name}/{PEAKS[role]}", in_float32(float(x.abs().max())) if x.numel() else 0.0
        self._peaks[slot] = max(peak, self._peaks.get(slot, (0.0, 0))[0]) if peak == peak else float("inf"), form.history
        largest = max(self.histories.get(slot, [0.0]))
        element = ELEMENTS[form.gradient if role == "gradient" else form.element]
        return torch.tensor(element.largest / max(largest, 1e-12) if largest else 1.0, dtype=torch.float32).reshape([1] * x.dim())

    def end_step(self) -> None:
        """Puts the largest magnitudes of the step in front; what is not finite counts as zero."""
        for slot, (peak, steps) in self._peaks.items():
            before = self.histories.get(slot, [0.0] * steps)
            self.histories[slot] = [peak if peak < float("inf") else 0.0, *before[:-1]]
        self._peaks.clear()

    def state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The histories among these names of state."""
        return {name: torch.tensor(self.histories[name]) for name in names if name in self.histories}


def in_float32(value: float) -> float:
    """The number of float32 that is nearest to one, whatever casts are widened to."""
    return ctypes.c_float(value).value
