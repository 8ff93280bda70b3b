"""Every call of the corpus with one thing at its extreme, one after the other: what chance finds late.

Each dim of each operand empty, one long and twice as long, alone and in all operands that have this size; each operand full of each wild
value, of each dtype; each number among the arguments each wild one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.attack.corpus import Call
from tests.attack.mutate import DTYPES, REALS, WILD

Edit = Callable[[Any], Any]
Corner = tuple[Call, dict[int, Edit]]
"""A call, and what is done to which of its leaves."""


def corners(call: Call) -> Iterator[Corner]:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    for place, leaf in enumerate(leaves):
        for edit in _of_tensor(leaf) if isinstance(leaf, Tensor) else _of_number(leaf):
            yield call, {place: edit}
    for size in {size for leaf in tensors.values() for size in leaf.shape}:
        for other in (0, 1, 2 * size):
            yield call, {place: partial(_all_sized, size, other) for place in tensors}


def made(corner: Corner) -> Call:
    call, edits = corner
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    args, kwargs = pytree.tree_unflatten([edits[place](leaf) if place in edits else leaf for place, leaf in enumerate(leaves)], spec)
    return Call(call.target, tuple(args), kwargs)


def _of_tensor(value: Tensor) -> Iterator[Edit]:
    for dim, size in enumerate(value.shape):
        for other in (0, 1, 2 * size):
            yield partial(_sized, dim, other)
    for dtype in DTYPES:
        yield partial(_cast, dtype)
    if value.dtype.is_floating_point:
        for number in REALS:
            yield partial(_full, number)
    elif not value.dtype.is_complex and value.dtype != torch.bool:
        info = torch.iinfo(value.dtype)
        for number in sorted({max(info.min, min(info.max, wild)) for wild in WILD}):
            yield partial(_full, number)


def _of_number(value: Any) -> Iterator[Edit]:
    numbers: tuple[Any, ...] = ()
    if isinstance(value, bool):
        numbers = (not value,)
    elif isinstance(value, int):
        numbers = WILD
    elif isinstance(value, float):
        numbers = REALS
    elif isinstance(value, torch.dtype):
        numbers = DTYPES
    for number in numbers:
        yield partial(_instead, number)


def _instead(other: Any, value: Any) -> Any:
    return other


def _cast(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype)


def _full(number: Any, value: Tensor) -> Tensor:
    if value.itemsize == 1:  # 8-bit floats take no number beyond their largest, but for a cast
        return torch.full_like(value, number, dtype=torch.float64).to(value.dtype)
    return torch.full_like(value, number)


def _sized(dim: int, size: int, value: Tensor) -> Tensor:
    if size <= value.shape[dim]:
        return value.narrow(dim, 0, size).clone()
    return torch.cat([value, value], dim)


def _all_sized(size: int, other: int, value: Tensor) -> Tensor:
    for dim, mine in enumerate(value.shape):
        value = _sized(dim, other, value) if mine == size else value
    return value
