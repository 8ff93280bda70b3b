"""One call changed in a few places: wild values in integer tensors, sizes that do not fit, other dtypes, strides, numbers, lists."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.attack.corpus import Call

POWERS = (1 << 16, 1 << 20, 1 << 31, 1 << 40, 1 << 62)
WILD = (-2, -1, 0, 1, 3, 5, 7, 64, 1000, 4097, *POWERS, *(-power for power in POWERS), (1 << 31) - 1, (1 << 63) - 1, -(1 << 63))
REALS = (0.0, -1.0, 1.0, 0.5, 1e-30, 1e30, -1e30, math.inf, -math.inf, math.nan, 2.0**31, 2.0**63)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)


def mutated(call: Call, draw: random.Random) -> Call:
    """The same operator; one to three of its operands are others. One time of eight nothing is."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]
    if places and draw.random() > 0.125:
        for place in draw.sample(places, min(len(places), draw.choice([1, 1, 1, 2, 3]))):
            leaves[place] = _other(leaves[place], draw)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    if draw.random() < 0.1:
        args = tuple(_longer(value, draw) if isinstance(value, list) else value for value in args)
    return Call(call.target, tuple(args), kwargs)


def _longer(value: list[Any], draw: random.Random) -> list[Any]:
    return value[:-1] if draw.random() < 0.5 or not value else [*value, value[-1]]


def _other(value: Any, draw: random.Random) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value, draw)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(WILD) if draw.random() < 0.7 else value + draw.choice([-1, 1, 2])
    if isinstance(value, float):
        return draw.choice(REALS)
    if isinstance(value, torch.dtype):
        return draw.choice(DTYPES)
    return value


def _tensor(value: Tensor, draw: random.Random) -> Tensor:
    kind = draw.random()
    whole = not value.dtype.is_floating_point and not value.dtype.is_complex and value.dtype != torch.bool
    if kind < (0.6 if whole else 0.2):
        return _values(value, whole, draw)
    if kind < 0.75:
        return _sized(value, draw)
    if kind < 0.85:
        return value.to(draw.choice(DTYPES))
    return _laid_out(value, draw)


def _values(value: Tensor, whole: bool, draw: random.Random) -> Tensor:
    found = value.clone()
    flat = found.view(-1) if found.is_contiguous() else found.reshape(-1)
    if flat.numel() == 0:
        return found
    for _ in range(draw.choice([1, 1, 3, flat.numel()])):
        place = draw.randrange(flat.numel())
        if whole:
            info, size = torch.iinfo(value.dtype), max(value.shape, default=1)
            wild = draw.choice([*WILD, size, size + 1, -size - 1, 2 * flat.numel()])
            flat[place] = max(info.min, min(info.max, wild))
        else:
            flat[place] = bool(draw.getrandbits(1)) if value.dtype == torch.bool else draw.choice(REALS)
    return flat.view(value.shape)


def _sized(value: Tensor, draw: random.Random) -> Tensor:
    shape = list(value.shape)
    how = draw.randrange(5)
    if how == 0 or not shape:
        return value.unsqueeze(draw.randint(0, len(shape)))
    dim = draw.randrange(len(shape))
    if how == 1:
        return value.select(dim, 0).clone() if shape[dim] else value
    if how == 2:
        return value.narrow(dim, 0, draw.randint(0, shape[dim])).clone()
    if how == 3:
        return torch.cat([value] * draw.choice([2, 3]), dim) if shape[dim] else value
    return value.new_zeros([draw.choice([0, 1, 2, 5, size]) for size in shape])


def _laid_out(value: Tensor, draw: random.Random) -> Tensor:
    if value.dim() < 2:
        return value.new_empty(0) if draw.random() < 0.3 else value.repeat(2)[::2] if value.dim() else value
    how = draw.randrange(3)
    if how == 0:
        return value.transpose(0, -1)
    if how == 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    return value.narrow(0, 0, min(1, value.shape[0])).expand(value.shape) if value.shape[0] else value
