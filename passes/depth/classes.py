"""Classes: which layers of a list are equal, and where blocks of them repeat.

    0 0 0 1 1 1 1 1 1 1     dense layers, then routed ones      stretches: 0 0 0 (three, all captured); 1 1 1 1 1 1 1
    0 1 0 1 0 1 0 1 0 1     local and global attention          stretch of period 2: 01 01 01 01 01

Two layers are equal if they make the same calls, of what is theirs, of what is the same for both, or of what lies equally far back; if
their modules have the same classes, attributes and hooks (which without gradients say nothing that calls do not); and if the request says
the same of both (groups of the optimizer, pins, where parameters are stored). Integers that grow in equal steps (`layer_idx`) do not tell
layers apart: what is made of them shows in calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from meshc.passes.depth.probe import UNKNOWN, Log, Origin, Row
from meshc.passes.depth.said import Said
from meshc.passes.depth.shown import shown
from meshc.passes.phases.depth import INSIDE

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARTS: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_call_impl", *HOOKS)


Parts = tuple[tuple[str, Any], ...]
"""What is compared of a layer, by what messages call it."""


@dataclass(frozen=True)
class Run:
    """Layers from `first` on, `layers` of them, that repeat with a period: all are equal to the one a period before, but for the first
    `ends` of them and for a block behind these, to which there is none. Those at its two ends may be anything: they are captured, and two
    blocks from inside."""

    first: int
    layers: int = 1
    period: int = 1
    ends: int = 1

    @property
    def blocks(self) -> int:
        """That are left out."""
        return max(0, (self.layers - 2 * self.ends) // self.period - len(INSIDE))

    @property
    def left_out(self) -> int:
        return self.blocks * self.period

    @property
    def seam(self) -> int:
        """Behind how many of its layers those that are left out come."""
        return self.ends + self.period


class Layers:
    """The layers of one list, to be compared."""

    def __init__(self, path: str, modules: Sequence[nn.Module], log: Log, said: Said) -> None:
        self.path = path
        values = log.values()
        parts: dict[int, list[Parts]] = {}
        self.faces = [_Face.of(path, number, module, log, values, said, parts) for number, module in enumerate(modules)]

    def runs(self, whole_ends: bool) -> list[Run]:
        """In order; each run is the one from its first layer that leaves out most, unless one from the next layer on leaves out more: then
        its first layer stands alone (of T5's it alone makes what all others are given). `whole_ends`: with a block at each end."""
        found: list[Run] = []
        first = 0
        while first < len(self.faces):
            best = self._best(first, whole_ends)
            if 0 < best.left_out < (after := self._best(first + 1, whole_ends)).left_out:
                found, best = [*found, Run(first)], after
            found.append(best)
            first = best.first + best.layers
        return found

    def _best(self, first: int, whole_ends: bool) -> Run:
        """The run from a layer on that leaves out most."""
        return max(self._from(first, whole_ends), key=lambda run: (run.left_out, -run.period))

    def _from(self, first: int, whole_ends: bool) -> list[Run]:
        found = [Run(first)]
        for period in range(1, (len(self.faces) - first - 2) // (len(INSIDE) + 1) + 1):
            ends = period if whole_ends else 1
            found.append(Run(first, self._layers(first, period, ends), period, ends))
        return found

    def _layers(self, first: int, period: int, ends: int) -> int:
        """How many layers there are from `first` on that repeat; each place of a block has its own step of integers."""
        steps: dict[int, tuple[int, ...]] = {}
        for number in range(first + ends + period, len(self.faces)):
            step = self._step(number - period, number)
            if step is None or steps.setdefault((number - first) % period, step) != step:
                return number - first
        return len(self.faces) - first

    def _step(self, one: int, other: int) -> tuple[int, ...] | None:
        """By how much the integers of two equal layers differ; None if they are not equal."""
        a, b = self.faces[one], self.faces[other]
        if not a.same(b) or not all(alike(x, y, other - one) for x, y in zip(a.origins, b.origins, strict=True)):
            return None
        return tuple(y - x for x, y in zip(a.integers, b.integers, strict=True))

    def difference(self) -> str:
        """The first thing that tells the second layer from the third, in words; for lists in which nothing repeats."""
        if len(self.faces) < 3:
            return ""
        a, b = self.faces[1], self.faces[2]
        for (name, mine), (_, theirs) in zip(a.parts, b.parts, strict=True):
            if mine != theirs:
                return f"{self.path}.1 and {self.path}.2 differ in {name}: {_first(mine, theirs)}"
        return f"{self.path}.1 and {self.path}.2 are given other things"


def alike(one: Origin, other: Origin, apart: int) -> bool:
    """Whether two layers read the same: one thing, or what is made equally far back. `apart` is how far apart they are."""
    if one == other:
        return one != UNKNOWN
    return one[0] == other[0] == "layer" and one[1] == other[1] and one[3:] == other[3:] and other[2] - one[2] == apart


@dataclass(frozen=True)
class _Face:
    """What is compared of one layer.

    parts     all but what lies outside it, with names for messages, one object for equal layers of a list;  body: their hash
    origins   what it reads that is not its own, in order
    integers  of its attributes
    """

    body: int
    parts: Parts
    origins: tuple[Origin, ...]
    integers: tuple[int, ...]

    @classmethod
    def of(
        cls, path: str, number: int, module: nn.Module, log: Log, values: Sequence[int], said: Said, known: dict[int, list[Parts]]
    ) -> _Face:
        """`known`: the parts of layers before, by their hashes, which are compared with each other again and again."""
        prefix = f"{path}.{number}"
        calls, origins = _calls(log.layers.get((path, number), []), prefix, (path, number), values)
        integers: list[int] = []
        attributes = tuple(_attributes(name, each, integers) for name, each in module.named_modules() if said.grad)
        tensors = tuple(
            (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, type(tensor))
            for table in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
            for name, tensor in table
        )
        parts = (
            ("calls", calls),
            ("attributes", attributes),
            ("parameters", tensors),
            ("what the plan and the optimizer say of them", said.of(prefix, module)),
        )
        body = hash(parts)
        found = next((one for one in known.get(body, ()) if one == parts), None)
        if found is None:
            known.setdefault(body, []).append(found := parts)
        return cls(body, found, origins, tuple(integers))

    def same(self, other: _Face) -> bool:
        """But for what the two read of others, of which they read as much."""
        if self.body != other.body or len(self.origins) != len(other.origins):
            return False
        return self.parts is other.parts or self.parts == other.parts


def _calls(
    rows: Sequence[Row], prefix: str, place: tuple[str, int], values: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[Origin, ...]]:
    found, origins = [], list[Origin]()
    for row in rows:
        own: list[Any] = []
        for origin in row.origins:
            if origin[0] == "parameter" and origin[1].startswith(f"{prefix}."):
                own.append(("own", origin[1][len(prefix) :]))
            elif origin[0] == "layer" and origin[1:3] == place:
                own.append(("own", *origin[3:]))
            else:
                own.append(None)
                origins.append(("outside", values[origin[1]], *origin[2:]) if origin[0] == "outside" else origin)
        found.append((row.what, tuple(own)))
    return tuple(found), tuple(origins)


# ---------------------------------------------------------------------------------------------------------------------- attributes


def _attributes(name: str, module: nn.Module, integers: list[int]) -> tuple[Any, ...]:
    """A module's class and what it holds beside parameters and modules. Integers go to `integers`."""
    held = tuple((key, shown(value, integers)) for key, value in sorted(vars(module).items()) if key not in PARTS)
    hooks = tuple((key, tuple(shown(hook, integers) for hook in getattr(module, key).values())) for key in HOOKS)
    return name, type(module), held, hooks


def _first(mine: Any, theirs: Any) -> str:
    """The first place at which two nested tuples differ."""
    while isinstance(mine, tuple) and isinstance(theirs, tuple) and mine and theirs:
        mine, theirs = next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), (len(mine), len(theirs)))
    return f"{str(mine)[:120]} and {str(theirs)[:120]}"

