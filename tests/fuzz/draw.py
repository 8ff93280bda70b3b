"""Draws a sketch: leaves and steps are added one by one, each step tried on real tensors before it is kept.

A step is kept if its results are finite, not large, and small enough in number; so a drawn program computes something that two correct
orders of summation agree on. What is left of doubt (a sign of a sum that cancels) `steady` finds, by running the program on values that are
wrong in their last digits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshc.errors import MeshcError
from meshc.frontend.reference_random import ReferenceRandom
from tests.fuzz.sketch import Leaf, Sketch, Step, run_step

LARGEST = 4096
"""Elements of a value, at most."""
PEAK = 1e3
EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
BATCHES = (2, 3, 4, 6, 8, 12)
UNSTEADY = 1e-12


NAMES = {"parameter": "p", "buffer": "b", "input": "x"}


class Unfit(Exception):
    """The operator has nothing to work on here."""


class Drawer:
    """A sketch under construction, with a value for every name; operators of the menu draw their operands and numbers from it.

    `batched`: all inputs begin with the rows of one batch, and nothing else is as long.
    """

    def __init__(self, chance: random.Random, batched: bool = False) -> None:
        self.chance = chance
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.env: dict[str, Any] = {}
        self.random = ReferenceRandom(0, 0)
        self.batch = chance.choice(BATCHES) if batched else 0
        extents = [extent for extent in EXTENTS if extent != self.batch]
        self.extents = chance.sample(extents, 3) + [chance.choice(extents[1:])] + [0] * (chance.random() < 0.06)

    # ------------------------------------------------------------------------------------------------------------------ numbers

    def coin(self, probability: float = 0.5) -> bool:
        return self.chance.random() < probability

    def one(self, items: Sequence[Any]) -> Any:
        if not items:
            raise Unfit
        return self.chance.choice(items)

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        if low > high:
            raise Unfit
        return self.chance.randint(low, high)

    def extent(self) -> int:
        return self.chance.choice(self.extents)

    def some(self, count: int, least: int = 1) -> list[int]:
        """Some of range(count), in order."""
        return sorted(self.chance.sample(range(count), self.number(min(least, count), count)))

    # ----------------------------------------------------------------------------------------------------------------- operands

    def value(self, name: str) -> Tensor:
        found: Tensor = self.env[name]
        return found

    def shape(self, name: str) -> list[int]:
        return list(self.value(name).shape)

    def leaf(self, shape: Sequence[int], dtype: str = "float64", high: int = 1, parameter: bool | None = None) -> str:
        if prod(shape) > LARGEST:
            raise Unfit
        if self.batch:
            parameter = list(shape)[:1] != [self.batch]
            if parameter and dtype != "float64":
                raise Unfit
        parameter = (self.coin(0.6) if parameter is None else parameter) and dtype == "float64"
        return self._leaf("parameter" if parameter else "input", shape, dtype, high, grad=not parameter and self.coin())

    def buffer(self, shape: Sequence[int], dtype: str = "float64", high: int = 1) -> str:
        """A new buffer, for one operator to write to."""
        return self._leaf("buffer", shape, dtype, high)

    def _leaf(self, kind: str, shape: Sequence[int], dtype: str, high: int, grad: bool = False) -> str:
        name = f"{NAMES[kind]}{sum(leaf.kind == kind for leaf in self.leaves)}"
        grad = grad and dtype == "float64"
        made = Leaf(name, kind, tuple(shape), dtype, 0, max(high, 1), grad, self.chance.randrange(10**6))
        self.leaves.append(made)
        self.env[name] = made.value().detach()
        return name

    def any_shape(self, least: int, most: int) -> list[int]:
        shape = [self.extent() for _ in range(self.number(least, most))]
        if shape and self.batch and self.coin():
            shape[0] = self.batch
        while prod(shape) > LARGEST // 4:
            shape[shape.index(max(shape))] = 2
        return shape

    def existing(self, fits: Callable[[Tensor], bool]) -> str | None:
        """A value made so far that fits, rather a recent one."""
        names = [name for name, value in self.env.items() if fits(value)]
        if not names:
            return None
        return names[-1 - int(len(names) * self.chance.random() ** 2 * 0.999)]

    def floating(self, least: int = 0, most: int = 5, filled: bool = False) -> str:
        """A floating value with a number of dims between two bounds; `filled`: with an element at least."""

        def fits(value: Tensor) -> bool:
            return value.dtype == torch.float64 and least <= value.dim() <= most and (value.numel() > 0 or not filled)

        found = self.existing(fits) if self.coin(0.93) else None
        if found is None:
            shape = self.any_shape(max(least, 1), max(least, min(most, 4)))
            found = self.leaf([max(extent, 1) for extent in shape] if filled else shape)
        return found

    def like(self, shape: Sequence[int]) -> str:
        """A floating value of this shape."""
        found = self.existing(lambda v: v.dtype == torch.float64 and list(v.shape) == list(shape)) if self.coin(0.7) else None
        return found or self.leaf(shape)

    def broadcasting(self, shape: Sequence[int]) -> str:
        """A floating value that broadcasts to this shape."""

        def fits(v: Tensor) -> bool:
            tail = list(shape)[len(shape) - v.dim() :]
            return v.dtype == torch.float64 and v.dim() <= len(shape) and all(a in (1, b) for a, b in zip(v.shape, tail, strict=True))

        found = self.existing(fits) if self.coin(0.75) else None
        if found is not None:
            return found
        lead = self.number(0, len(shape)) if self.coin(0.4) else 0
        return self.leaf([1 if self.coin(0.2) else extent for extent in list(shape)[lead:]])

    def indices(self, shape: Sequence[int], high: int) -> str:
        """Integers in [0, high), of this shape."""
        if high < 1:
            raise Unfit

        def fits(v: Tensor) -> bool:
            return (
                v.dtype == torch.int64 and list(v.shape) == list(shape) and v.numel() > 0 and int(v.min()) >= 0 and int(v.max()) < high
            )

        found = self.existing(fits) if self.coin(0.3) else None
        return found or self.leaf(shape, "int64", high)

    def truths(self, shape: Sequence[int]) -> str:
        found = self.existing(lambda v: v.dtype == torch.bool and list(v.shape) == list(shape)) if self.coin(0.6) else None
        return found or self.leaf(shape, "bool")

    def dim(self, name: str) -> int:
        """A dim of a value, counted from either end."""
        rank = self.value(name).dim()
        return self.number(-rank, rank - 1)

    # -------------------------------------------------------------------------------------------------------------------- steps

    def attempt(self, op: str, draw: Callable[[Drawer], tuple[str, Sequence[str]]]) -> bool:
        """Try an operator of the menu once; whether a step was added."""
        leaves, drawn = len(self.leaves), len(self.random.drawn)
        written = {leaf.name for leaf in self.leaves if leaf.kind == "buffer"}
        known = {name: value.clone() if name in written else value for name, value in self.env.items()}
        try:
            text, operands = draw(self)
            step = self._named(op, text, tuple(operands))
            with self.random, torch.no_grad():
                run_step(step, self.env)
            self._judge(step)
        except (Unfit, RuntimeError, IndexError, ValueError, TypeError, MeshcError):
            del self.leaves[leaves:], self.random.drawn[drawn:]
            self.env = known
            return False
        self.steps.append(step)
        return True

    def _named(self, op: str, text: str, operands: tuple[str, ...]) -> Step:
        count = 1
        while f"{{out{count}}}" in text:
            count += 1
        if "{out" not in text:
            text = f"{{out}} = {text}"
        first = sum(len(step.outs) for step in self.steps)
        return Step(op, text, operands, tuple(f"v{first + index}" for index in range(count)))

    def _judge(self, step: Step) -> None:
        for name in step.outs:
            value = self.env[name]
            if not isinstance(value, Tensor) or value.numel() > LARGEST or value.dim() > 6:
                raise Unfit
            if value.is_floating_point() and value.numel() and not float(value.abs().max()) < PEAK:
                raise Unfit
            if value.dtype not in (torch.float64, torch.int64, torch.bool):
                raise Unfit

    def finish(self, loss: bool) -> Sketch:
        """The sketch: outputs are what nothing else reads, and some more."""
        read = {name for step in self.steps for name in step.operands}
        made = [name for step in self.steps for name in step.outs]
        kept = [name for name in made if name not in read or self.coin(0.05)]
        if loss:
            kept = [name for name in kept if self.value(name).dtype == torch.float64 and self.value(name).numel()]
        cuts = sorted(self.number(0, len(self.steps)) for _ in range(self.number(1, 2))) if self.coin(0.4) else []
        ends = [*cuts, len(self.steps)]
        parts = tuple(end - start for start, end in zip([0, *cuts], ends, strict=True)) if cuts else ()
        return pruned(Sketch(tuple(self.leaves), tuple(self.steps), tuple(kept), parts, loss, self.batch))


def pruned(sketch: Sketch) -> Sketch:
    """Without steps and leaves that no output needs."""
    needed = set(sketch.outputs)
    kept = [False] * len(sketch.steps)
    for index in reversed(range(len(sketch.steps))):
        step = sketch.steps[index]
        if needed & set(step.outs):
            kept[index] = True
            needed |= set(step.operands)
    parts, start = [], 0
    for count in sketch.parts:
        parts.append(sum(kept[start : start + count]))
        start += count
    steps = tuple(step for step, stays in zip(sketch.steps, kept, strict=True) if stays)
    leaves = tuple(leaf for leaf in sketch.leaves if leaf.name in needed)
    return replace(sketch, steps=steps, leaves=leaves, parts=tuple(parts) if len(steps) else ())


class _RowMajor(torch.autograd.Function):
    """The value and its gradient, in row-major order."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def outcome(sketch: Sketch, noise: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Floating outputs and gradients on one device; with `noise`, every floating value is off by that part of itself.

    Noisy values and their gradients also lie in row-major order: some kernels of torch are wrong about others (batch norm's backward, where
    input and gradient lie differently), and are no reference then. Nor is a noisy zero negative: what kernel or decomposition of torch sums
    negative zeros says which zero that is, and so do tiles that are padded.
    """
    generator = torch.Generator().manual_seed(seed)
    leaves = {leaf.name: leaf.value() for leaf in sketch.leaves}
    env: dict[str, Any] = dict(leaves)
    reference = ReferenceRandom(0, 0)
    for step in sketch.steps:
        with reference:
            run_step(step, env)
        for name in step.outs if noise else ():
            value = env[name]
            if value.is_floating_point() and bool((value != value.round()).any()):
                noisy = value * (1 + noise * torch.randn(value.shape, generator=generator, dtype=value.dtype))
                env[name] = _RowMajor.apply(noisy + 0.0)
    outputs = [env[name] for name in sketch.outputs]
    wanting = [value for value in leaves.values() if value.requires_grad]
    given = [value for value in outputs if value.requires_grad]
    gradients: list[Tensor] = []
    if wanting and given:
        weights = [torch.cos(torch.arange(value.numel(), dtype=torch.float64)).reshape(value.shape) for value in given]
        found = torch.autograd.grad(given, wanting, weights, allow_unused=True)
        gradients = [value for value in found if value is not None]
    return [value.detach() for value in (*outputs, *gradients)]


def steady(sketch: Sketch) -> bool:
    """Whether results are finite and do not depend on the last digits of what they are computed from."""
    try:
        plain = outcome(sketch)
    except (RuntimeError, IndexError, ValueError):  # no derivative, or what backward needs is overwritten, or rows that are not there
        return False
    if not all(bool(value.isfinite().all()) for value in plain):
        return False
    for seed in range(2):
        noisy = outcome(sketch, 4e-15, seed)
        if sketch.loss and abs(_loss(sketch, plain) - _loss(sketch, noisy)) > 1e3 * UNSTEADY * abs(_loss(sketch, plain)):
            return False  # such as the mean of what a norm has made, which is zero but for roundings
        for one, other in zip(plain, noisy, strict=True):
            if not one.is_floating_point():
                if not torch.equal(one, other):
                    return False
            elif one.numel() and float((one - other).abs().max()) > UNSTEADY * max(float(one.abs().max()), 1e-3):
                return False
    return True


def _loss(sketch: Sketch, values: Sequence[Tensor]) -> float:
    """The sum of the outputs' means."""
    return sum(float(value.double().mean()) for value in values[: len(sketch.outputs)])
