"""What a change of sharding costs, by the steps that `partition` would take.

    [batch/dp, ffn/tp] -> [batch/dp/tp, ffn]     all_to_all over tp, of 1/4 of the bytes

The steps depend on which axes move from where to where, not on what the slots are called: those that nothing splits are left out, and
slots are taken as large enough for every axis, so that one list of steps serves all values. Padding in messages is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from meshc.cost.devices import Device
from meshc.cost.links import fastest, link_of
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.passes.partition.reshard import apply, merge, steps
from meshc.passes.planner.space import Axes, Form

Message: TypeAlias = tuple[str, Axes, float]
"""Kind, axes, and the part of the whole value's elements that the collective takes (of a gather: gives)."""


@dataclass
class Moves:
    mesh: Mesh
    sizes: Mapping[str, int]
    device: Device
    _messages: dict[object, tuple[Message, ...]] = field(default_factory=dict)
    _seconds: dict[object, float] = field(default_factory=dict)

    def seconds(self, source: Form, target: Form, size: float) -> float:
        """Of a value of so many bytes, if whole."""
        if source == target:
            return 0.0
        moved = tuple((a, b) for a, b in zip(source[0], target[0], strict=True) if a or b)
        key = moved, source[1], target[1], size
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = sum(self._message(one, size) for one in self.messages(moved, source[1], target[1]))
        return found

    def messages(
        self, moved: tuple[tuple[Axes, Axes], ...], before: tuple[tuple[str, str], ...], after: tuple[tuple[str, str], ...]
    ) -> tuple[Message, ...]:
        key = moved, before, after
        found = self._messages.get(key)
        if found is None:
            large = prod(self.sizes.values()) ** 2
            now = Sharding(tuple((Part("", large, one),) for one, _ in moved), before)
            target = Sharding(tuple((Part("", large, one),) for _, one in moved), after)
            total = float(large) ** len(moved)
            listed: list[Message] = []
            for step in merge(steps(now, target)):
                part = prod(local_shape(now, self.sizes)) / total
                now = apply(now, step)
                if step.kind == "all_gather":
                    part = prod(local_shape(now, self.sizes)) / total
                listed.append((step.kind, step.axes, part))
            found = self._messages[key] = tuple(listed)
        return found

    def _message(self, message: Message, size: float) -> float:
        kind, axes, part = message
        if kind == "slice":
            return 0.0
        if kind == "first":
            return self.device.launch_s + 2 * part * size / self.device.bytes_per_s
        link = link_of(self.mesh, axes, self.device)
        ranks = prod(self.sizes[axis] for axis in axes)
        return self.device.collective_s + fastest(kind, ranks, part * size, link).seconds(link)
