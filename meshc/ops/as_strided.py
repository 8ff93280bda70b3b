"""`as_strided` and `fill_diagonal_` as slices, windows and diagonals of the dims that the strides step along.

    as_strided(x [4, 6, 6], (4, 6), (36, 7))                     x.diagonal(0, 1, 2)
    as_strided(x [4, 12, 8], (4, 5, 4, 8), (96, 16, 8, 1))       x.unfold(1, 4, 2).permute(0, 1, 3, 2)

A stride is a step along one dim of x, or along two of them together (a diagonal); two strides along one dim are windows. Dims of x that
are contiguous may count as one, as in Longformer's overlapping chunks. Other calls stay torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor


def as_strided(input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
    """As `torch.as_strided`, for values whose strides are known."""
    start: Any = 0 if storage_offset is None else storage_offset - input.storage_offset()
    if start >= 0 and input.numel() and all(size):
        for merged in _mergings(input):
            steps = _steps(merged.shape, merged.stride(), size, stride, start)
            if steps is not None:
                return _take_views(merged, steps, size)
    return torch.as_strided(input, size, stride, storage_offset)


def fill_diagonal(input: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """As `Tensor.fill_diagonal_`, in place, for which torch uses a strided view."""
    if wrap or input.dim() != 2:
        return input.fill_diagonal_(fill_value, wrap)
    return input.masked_fill_(torch.eye(*input.shape, dtype=torch.bool, device=input.device), fill_value)


@dataclass(frozen=True)
class _Steps:
    """`first` index in each dim of x, and for each dim of the result that moves its step along each dim of x, `by_dim`."""

    first: tuple[int, ...]
    by_dim: dict[int, dict[int, int]]

    def users(self, dim: int) -> list[int]:
        """The dims of the result that move along a dim of x, the longest step first."""
        return sorted((j for j, steps in self.by_dim.items() if dim in steps), key=lambda j: -self.by_dim[j][dim])


def _mergings(x: Tensor) -> Iterator[Tensor]:
    """x with its dims sorted by stride, without those of size 1: first unmerged, then with contiguous neighbours merged."""
    strides = x.stride()
    dims = sorted((d for d in range(x.dim()) if x.shape[d] > 1), key=lambda d: -strides[d])
    x = x.permute([*dims, *(d for d in range(x.dim()) if d not in dims)]).reshape([x.shape[d] for d in dims])
    fits = [x.stride(d) == x.stride(d + 1) * x.shape[d + 1] for d in range(x.dim() - 1)]
    choices = sorted(product(*((False, True) if fit else (False,) for fit in fits)), key=sum)
    for joined in choices:
        shape = list(x.shape[:1])
        for extent, join in zip(x.shape[1:], joined, strict=True):
            shape = [*shape[:-1], shape[-1] * extent] if join else [*shape, extent]
        yield x.reshape(shape)


def _steps(shape: Sequence[int], strides: Sequence[int], size: Sequence[int], stride: Sequence[int], start: int) -> _Steps | None:
    """Steps of a strided view; None where an index would leave its dim, or the view is not slices, windows and diagonals."""
    first = _strides_to_steps(start, strides)
    moves = {j: _strides_to_steps(step, strides) for j, (extent, step) in enumerate(zip(size, stride, strict=True)) if extent > 1 and step}
    if first is None or None in moves.values():
        return None
    found = _Steps(first, {j: {d: step for d, step in enumerate(steps or ()) if step} for j, steps in moves.items()})
    for d, extent in enumerate(shape):
        users = found.users(d)
        last = first[d] + sum(found.by_dim[j][d] * (size[j] - 1) for j in users)
        if last >= extent or len(users) > 2 or len(users) == 2 and any(len(found.by_dim[j]) > 1 for j in users):
            return None
    return found if all(len(steps) <= 2 for steps in found.by_dim.values()) else None


def _strides_to_steps(distance: int, strides: Sequence[int]) -> tuple[int, ...] | None:
    """A distance in memory as steps along dims of `strides`, the longest first; None if these do not divide it."""
    steps = []
    for stride in strides:
        count, distance = divmod(distance, stride) if stride else (0, distance)
        steps.append(count)
    return tuple(steps) if distance == 0 else None


def _take_views(x: Tensor, steps: _Steps, size: Sequence[int]) -> Tensor:
    """The view of `x` by slices, windows and diagonals, with the dims in the result's order."""
    labels: list[int | None] = []  # for each present dim of x, its dim of the result
    windows: list[int] = []
    for d, first in enumerate(steps.first):
        users = steps.users(d)
        spans = [steps.by_dim[j][d] * (size[j] - 1) for j in users]
        step = steps.by_dim[users[0]][d] if len(users) == 1 else 1
        x = x[(slice(None),) * d + (slice(first, first + sum(spans) + 1, step),)]
        if len(users) == 2:
            outer, inner = users
            x = x.unfold(d, spans[1] + 1, steps.by_dim[outer][d])[..., :: steps.by_dim[inner][d]]
            windows.append(inner)
        labels.append(users[0] if users else None)
    labels += windows
    for j, moves in steps.by_dim.items():
        if len(moves) == 2:
            one, other = (d for d, label in enumerate(labels) if label == j)
            x = x.diagonal(0, one, other)
            labels = [label for label in labels if label != j] + [j]
    for d in reversed([d for d, label in enumerate(labels) if label is None]):
        x = x.select(d, 0)
        del labels[d]
    x = x.permute([labels.index(j) for j in steps.by_dim])
    return x[tuple(slice(None) if j in steps.by_dim else None for j in range(len(size)))].expand(list(size))
