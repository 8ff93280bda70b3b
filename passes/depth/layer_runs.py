"""Runs of equal layers in a list of modules: which layers are equal, and with which period blocks of them repeat.

    0 0 0 1 1 1 1 1 1 1     dense layers, then routed ones      stretches: 0 0 0 (three, all captured); 1 1 1 1 1 1 1
    0 1 0 1 0 1 0 1 0 1     local and global attention          stretch of period 2: 01 01 01 01 01

Two layers are equal if they make the same calls, on tensors of their own, on common ones, or on ones from equally many layers back; if
their modules have the same classes, attributes and hooks (compared with gradients only: without, calls show all); and if the request's
settings are the same for both (groups of the optimizer, pins, storage of parameters). Integers that grow in equal steps (`layer_idx`) do
not make layers differ: what depends on them shows in calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from meshc.passes.depth.comparable_values import comparable_value
from meshc.passes.depth.layer_settings import LayerSettings
from meshc.passes.depth.probe import UNKNOWN, Log, Origin, RecordedCall
from meshc.passes.phases.captured_depth import INSIDE

HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
PARTS: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_call_impl", *HOOKS)


Parts = tuple[tuple[str, Any], ...]
"""The compared parts of a layer, by their names in messages."""


@dataclass(frozen=True)
class LayerRun:
    """`layers` layers from `first` on that repeat with `period`: each is equal to the one a period before, except the first `ends` layers
    and the block behind these, which have none before them. The `ends` layers at both ends may be anything: they are captured, with two
    blocks from inside."""

    first: int
    layers: int = 1
    period: int = 1
    ends: int = 1

    @property
    def blocks(self) -> int:
        """Number of blocks that are left out."""
        return max(0, (self.layers - 2 * self.ends) // self.period - len(INSIDE))

    @property
    def left_out(self) -> int:
        return self.blocks * self.period

    @property
    def seam(self) -> int:
        """Number of the run's layers before those that are left out."""
        return self.ends + self.period


class Layers:
    """The layers of one list, for comparison."""

    def __init__(self, path: str, modules: Sequence[nn.Module], log: Log, said: LayerSettings) -> None:
        self.path = path
        values = log.values()
        parts: dict[int, list[Parts]] = {}
        self.faces = [_LayerSignature.of(path, number, module, log, values, said, parts) for number, module in enumerate(modules)]

    def runs(self, whole_ends: bool) -> list[LayerRun]:
        """The runs in order. Each is the one from its first layer that leaves out most, unless one from the next layer on leaves out more:
        then its first layer stands alone (T5's first layer computes what all others are passed). `whole_ends`: a whole block is captured
        at each end."""
        found: list[LayerRun] = []
        first = 0
        while first < len(self.faces):
            best = self._best(first, whole_ends)
            if 0 < best.left_out < (after := self._best(first + 1, whole_ends)).left_out:
                found, best = [*found, LayerRun(first)], after
            found.append(best)
            first = best.first + best.layers
        return found

    def _best(self, first: int, whole_ends: bool) -> LayerRun:
        """The run from layer `first` on that leaves out most."""
        found = [LayerRun(first)]
        for period in range(1, (len(self.faces) - first - 2) // (len(INSIDE) + 1) + 1):
            ends = period if whole_ends else 1
            found.append(LayerRun(first, self._layers(first, period, ends), period, ends))
        return max(found, key=lambda run: (run.left_out, -run.period))

    def _layers(self, first: int, period: int, ends: int) -> int:
        """The number of layers from `first` on that repeat; each place of a block has its own step of integers."""
        steps: dict[int, tuple[int, ...]] = {}
        for number in range(first + ends + period, len(self.faces)):
            step = self._step(number - period, number)
            if step is None or steps.setdefault((number - first) % period, step) != step:
                return number - first
        return len(self.faces) - first

    def _step(self, one: int, other: int) -> tuple[int, ...] | None:
        """The differences between the integers of two equal layers; None if the layers are not equal."""
        a, b = self.faces[one], self.faces[other]
        if not a.same(b) or not all(is_same_origin(x, y, other - one) for x, y in zip(a.origins, b.origins, strict=True)):
            return None
        return tuple(y - x for x, y in zip(a.integers, b.integers, strict=True))

    def difference(self) -> str:
        """The first difference between the second layer and the third, as text; for lists in which nothing repeats."""
        if len(self.faces) < 3:
            return ""
        a, b = self.faces[1], self.faces[2]
        for (name, mine), (_, theirs) in zip(a.parts, b.parts, strict=True):
            if mine != theirs:
                return f"{self.path}.1 and {self.path}.2 differ in {name}: {_first(mine, theirs)}"
        return f"{self.path}.1 and {self.path}.2 are given other things"


def is_same_origin(one: Origin, other: Origin, apart: int) -> bool:
    """Whether two layers, `apart` apart, read the same: one tensor, or results from equally many layers back."""
    if one == other:
        return one != UNKNOWN
    return one[0] == other[0] == "layer" and one[1] == other[1] and one[3:] == other[3:] and other[2] - one[2] == apart


@dataclass(frozen=True)
class _LayerSignature:
    """Signature of one layer for comparison.

    parts     named parts that do not depend on other layers, one object for equal layers of a list;  body: their hash
    origins   origins of tensors that the layer reads from outside, in order
    integers  integers among its attributes
    """

    body: int
    parts: Parts
    origins: tuple[Origin, ...]
    integers: tuple[int, ...]

    @classmethod
    def of(
        cls, path: str, number: int, module: nn.Module, log: Log, values: Sequence[int], said: LayerSettings, known: dict[int, list[Parts]]
    ) -> _LayerSignature:
        """`known`: the parts of the layers before, by hash, so that equal parts become one object and compare fast."""
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
        alike = known.setdefault(body, [])
        found = next((one for one in alike if one == parts), parts)
        if found is parts:
            alike.append(parts)
        return cls(body, found, origins, tuple(integers))

    def same(self, other: _LayerSignature) -> bool:
        """Whether two layers are equal, apart from the values of `origins`, of which they have equally many."""
        if self.body != other.body or len(self.origins) != len(other.origins):
            return False
        return self.parts is other.parts or self.parts == other.parts


def _calls(
    rows: Sequence[RecordedCall], prefix: str, place: tuple[str, int], values: Sequence[int]
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
    """A module's class and its attributes other than parameters and modules. Integers are appended to `integers`."""
    held = tuple((key, comparable_value(value, integers)) for key, value in sorted(vars(module).items()) if key not in PARTS)
    hooks = tuple((key, tuple(comparable_value(hook, integers) for hook in getattr(module, key).values())) for key in HOOKS)
    return name, type(module), held, hooks


def _first(mine: Any, theirs: Any) -> str:
    """The first place at which two nested tuples differ."""
    while isinstance(mine, tuple) and isinstance(theirs, tuple) and mine and theirs:
        mine, theirs = next(((a, b) for a, b in zip(mine, theirs, strict=False) if a != b), (len(mine), len(theirs)))
    return f"{str(mine)[:120]} and {str(theirs)[:120]}"

