"""Lazy values of recorded tensors, computed for any box of a tensor at a time.

    normal_(weight); weight[0].zero_()   WrittenValue(Result(normal_, call 7), row 0, Result(zero_))
    box rows 4:8 of weight                    the draws of call 7 at rows 4:8; row 0 is not among them

Elementwise operators, and draws that fill a tensor, are computed for the box alone, in chunks; anything else (a QR decomposition) is
computed whole, and its box taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from meshc.frontend.reference_random import FILLING, ReferenceRandom
from meshc.ir.schemas import written_arguments
from meshc.private import OpOverload, trees_of_torch

aten = torch.ops.aten
Box: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each dim."""

CHUNK_BYTES: Final = 16 << 20
"""Size of a chunk: a few tensors of this size exist beside the result."""

_ELEMENTWISE: Final = {
    aten.zero_, aten.fill_, aten.copy_, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten._to_copy, aten.clone,
    aten.detach, aten.alias,
}  # fmt: skip
"""Elementwise operators without torch's tag `pointwise`."""

_DRAWN: Final = {
    *(getattr(aten, f"{name}_") for name in FILLING), aten.bernoulli_, aten.rand, aten.randn, aten.rand_like, aten.randn_like
}  # fmt: skip
"""Random operators that give each element its own draw, numbered like the element."""

_OVERWRITES: Final = {aten.zero_, aten.fill_, aten.copy_, aten.bernoulli_, *(getattr(aten, f"{name}_") for name in FILLING)}
"""Operators that overwrite their operand without reading it."""


class Geometry(NamedTuple):
    """Size, strides and offset of a view in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> Geometry:
        return cls(tuple(x.shape), x.stride(), int(x.storage_offset()))


@dataclass(eq=False)
class RecordedValue:
    """A tensor's value at one moment. `number` counts the values of a recording."""

    number: int
    geometry: Geometry
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry.size


@dataclass(eq=False)
class InitialValue(RecordedValue):
    """The value before the recording, by the tensor's number in the model."""

    at: int


@dataclass(eq=False)
class TensorValue(RecordedValue):
    """A tensor that is not recorded, or was computed on the way."""

    tensor: Tensor


@dataclass(eq=False)
class Result(RecordedValue):
    """A call's result in one of its arguments (`written`) or among its outputs (`output`). Tensors in `args` are `RecordedValue`s; `call`
    is the number of its draws."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: int | None
    written: int | str | None = None
    output: int = 0


@dataclass(eq=False)
class ViewValue(RecordedValue):
    """A view of a value."""

    base: RecordedValue


@dataclass(eq=False)
class WrittenValue(RecordedValue):
    """A value after a write to a view of it."""

    base: RecordedValue
    where: Geometry
    value: RecordedValue


class _SingleCallRandom(ReferenceRandom):
    """Answers the one random call inside it with the draws of call `number`, at a tile of these."""

    def __init__(self, seed: int, step: int, number: int, shape: Sequence[int], box: Box) -> None:
        super().__init__(seed, step)
        self._number, self._whole, self._starts = number, list(shape), [start for start, _ in box]

    def tile_of_call(self, call: int, shape: tuple[int, ...]) -> tuple[int, tuple[Sequence[int], Sequence[int], Sequence[int]]]:
        elementwise = len(shape) == len(self._whole)
        return self._number, (self._whole, shape, self._starts) if elementwise else (shape, shape, [0] * len(shape))


class Evaluation:
    """Computes values. `given(at)` is the whole value of the model's tensor `at` before, or None where there was none."""

    def __init__(self, seed: int, step: int, given: Callable[[int], Tensor | None]) -> None:
        self._seed, self._step, self._given = seed, step, given
        self._whole: dict[int, Tensor] = {}
        self._stood: dict[int, Tensor | None] = {}

    def forget(self) -> None:
        """Drops values that were computed whole, and earlier values that were requested."""
        self._whole.clear()
        self._stood.clear()

    def request(self, value: RecordedValue) -> None:
        """Requests the earlier values that `value` depends on, in the same order on every rank."""
        for at in sorted(reads(value)):
            self._before(at)

    @torch.no_grad()
    def compute_box(self, value: RecordedValue, box: Box | None = None) -> Tensor:
        """A box of a value, in memory of its own; all of it by default."""
        box = box or full(value.shape)
        out = torch.empty([stop - start for start, stop in box], dtype=value.dtype)
        for rows, chunk in _chunks(box, value.dtype):
            out[rows] = self._box(value, chunk)
        return out

    def holds_anywhere(self, value: RecordedValue) -> bool:
        """Whether any element is nonzero, computed a chunk at a time."""
        return any(bool(self._box(value, chunk).any()) for _, chunk in _chunks(full(value.shape), value.dtype))

    def _box(self, value: RecordedValue, box: Box) -> Tensor:
        """A box of a value. Not to be written: its memory may be shared."""
        if isinstance(value, TensorValue):
            return value.tensor[_slices(box)]
        if isinstance(value, WrittenValue):
            return self._written_box(value, box)
        if isinstance(value, ViewValue):
            return self._view_box(value, box)
        if isinstance(value, InitialValue) and self._before(value.at) is None:
            return unwritten_tensor([stop - start for start, stop in box], value.dtype)
        if isinstance(value, Result) and _by_element(value.func):
            return self._run_call(value, box)
        return self._all(value)[_slices(box)]

    def _all(self, value: RecordedValue) -> Tensor:
        """A value whole, memoised until `forget`."""
        found = self._whole.get(value.number)
        if found is None:
            found = self._whole[value.number] = self._compute_whole(value)
        return found

    def _compute_whole(self, value: RecordedValue) -> Tensor:
        if isinstance(value, InitialValue):
            before = self._before(value.at)
            return before if before is not None else unwritten_tensor(value.shape, value.dtype)
        if isinstance(value, Result):
            return self._run_call(value, None)
        return self._box(value, full(value.shape))

    def _before(self, at: int) -> Tensor | None:
        if at not in self._stood:
            self._stood[at] = self._given(at)
        return self._stood[at]

    def _run_call(self, value: Result, box: Box | None) -> Tensor:
        """Runs a call, on the `box` of each operand or on whole operands."""
        written: dict[int | str, Tensor] = {}
        overwritten = written_arguments(value.func)

        def operand(at: int | str, leaf: object) -> object:
            if not isinstance(leaf, RecordedValue):
                return leaf
            if at == value.written and value.func.overloadpacket in _OVERWRITES:
                written[at] = torch.empty(here, dtype=leaf.dtype)
                return written[at]
            read = self._all(leaf) if box is None else self._box(leaf, _beside(leaf.shape, box))
            if at == value.written or at in overwritten or at in overwritten.values():
                read = written[at] = read.clone()
            return read

        shape = value.shape
        here = [stop - start for start, stop in box] if box is not None else list(shape)

        args = [trees_of_torch.tree_map(lambda leaf, at=at: operand(at, leaf), arg) for at, arg in enumerate(value.args)]
        kwargs = {name: trees_of_torch.tree_map(lambda leaf, at=name: operand(at, leaf), arg) for name, arg in value.kwargs.items()}
        if box is not None and value.func.overloadpacket in (aten.rand, aten.randn):
            args[0] = here
        if value.call is None:
            made = value.func(*args, **kwargs)
        else:
            with _SingleCallRandom(self._seed, self._step, value.call, shape, box or full(shape)):
                made = value.func(*args, **kwargs)
        if value.written is not None:
            return written[value.written]
        return trees_of_torch.tree_leaves(made)[value.output]

    def _view_box(self, value: ViewValue, box: Box) -> Tensor:
        ranges = ranges_of(value.base.geometry, value.geometry)
        if ranges is None:
            return _memory(value.base.geometry, self._all(value.base)).as_strided(*value.geometry)[_slices(box)]
        wanted, at = [], iter(box)
        for start, _, kept in ranges:
            first, last = next(at) if kept else (0, 1)
            wanted.append((start + first, start + last))
        return self._box(value.base, tuple(wanted)).reshape([stop - start for start, stop in box])

    def _written_box(self, value: WrittenValue, box: Box) -> Tensor:
        ranges = ranges_of(value.base.geometry, value.where)
        if ranges is None:
            whole = _memory(value.base.geometry, self._all(value.base))
            whole.as_strided(*value.where).copy_(self._all(value.value))
            return whole[_slices(box)]
        out = self._box(value.base, box).clone()
        both = [(max(start, first), min(stop, last)) for (start, stop, _), (first, last) in zip(ranges, box, strict=True)]
        if any(start >= stop for start, stop in both):
            return out
        inner = tuple((start - origin, stop - origin) for (start, stop), (origin, _, kept) in zip(both, ranges, strict=True) if kept)
        target = out[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(both, box, strict=True))]
        target.copy_(self._box(value.value, inner).reshape(target.shape))
        return out


def reads(value: RecordedValue) -> set[int]:
    """Numbers of the model's tensors whose earlier values `value` depends on."""
    found: set[int] = set()
    left, met = [value], {value.number}
    while left:
        one = left.pop()
        if isinstance(one, InitialValue):
            found.add(one.at)
        for operand in _operands(one):
            if operand.number not in met:
                met.add(operand.number)
                left.append(operand)
    return found


def _operands(value: RecordedValue) -> list[RecordedValue]:
    if isinstance(value, WrittenValue):
        return [value.base, value.value]
    if isinstance(value, ViewValue):
        return [value.base]
    if not isinstance(value, Result):
        return []
    over = value.written if value.func.overloadpacket in _OVERWRITES else None
    read = [arg for at, arg in enumerate(value.args) if at != over], [arg for name, arg in value.kwargs.items() if name != over]
    return [leaf for leaf in trees_of_torch.tree_leaves(read) if isinstance(leaf, RecordedValue)]


def _by_element(func: OpOverload) -> bool:
    return func.overloadpacket in _DRAWN or func.overloadpacket in _ELEMENTWISE or torch.Tag.pointwise in func.tags


def _chunks(box: Box, dtype: torch.dtype) -> Iterator[tuple[slice | EllipsisType, Box]]:
    """A box in chunks of `CHUNK_BYTES`, if its rows are no larger: the rows of each in the box, and its own box."""
    if not box:
        yield ..., box
        return
    (first, last), *rest = box
    size = max(1, CHUNK_BYTES // max(1, dtype.itemsize * math.prod(stop - start for start, stop in rest)))
    for at in range(first, last, size):
        stop = min(last, at + size)
        yield slice(at - first, stop - first), ((at, stop), *rest)


def full(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def unwritten_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The value of a tensor that was never written: NaN, or 0 for dtypes without NaN."""
    made = torch.zeros(tuple(shape), dtype=dtype)
    return made.fill_(float("nan")) if made.is_floating_point() or made.is_complex() else made


def ranges_of(base: Geometry, view: Geometry) -> list[tuple[int, int, bool]] | None:
    """(start, stop, whether the view has the dim) of each dim of a contiguous base that `view` covers; None for any other view."""
    if base.stride != contiguous(base.size) or base.offset:
        return None
    ranges: list[tuple[int, int, bool]] = []
    rest, at = view.offset, 0
    for size, stride in zip(base.size, base.stride, strict=True):
        start = min(rest // stride, max(0, size - 1)) if stride else 0
        rest -= start * stride
        if at < len(view.size) and (view.stride[at] == stride or view.size[at] == 1 == size):
            ranges.append((start, start + view.size[at], True))
            at += 1
        else:
            ranges.append((start, start + 1, False))
    fits = all(stop <= size for (_, stop, _), size in zip(ranges, base.size, strict=True))
    return ranges if fits and rest == 0 and at == len(view.size) else None


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    strides = itertools.accumulate([1, *(max(1, one) for one in reversed(size))], lambda a, b: a * b)
    return tuple(reversed(list(strides)[: len(size)]))


def _memory(base: Geometry, whole: Tensor) -> Tensor:
    """A copy of a tensor with the strides of the tensor that its views were taken of."""
    return torch.empty_strided(base.size, base.stride, dtype=whole.dtype).copy_(whole)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _beside(shape: tuple[int, ...], box: Box) -> Box:
    """The box of an operand that is broadcast to the tensor of `box`."""
    behind = box[len(box) - len(shape) :] if shape else ()
    return tuple((0, 1) if size == 1 else pair for size, pair in zip(shape, behind, strict=True))
