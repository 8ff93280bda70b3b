"""Torch's dropout functions, and recurrent layers with dropout, in meshc operators, with two more keywords, `seed_step` and `call`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshc.ir.functions import Function, Target
from meshc.ops import recurrent
from meshc.ops.random import dropout, dropout_without_draws, keep_mask, keep_scale

functional = torch.nn.functional
ALPHA = 1.7580993408473766
"""SELU's alpha times its scale, as in torch's Dropout.cpp."""


def _raised_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, seed_step: Tensor, call: int) -> Tensor:
    out = dropout(input, seed_step, call, p) if training and 0.0 < p < 1.0 else dropout_without_draws(input, p, training)
    return input.copy_(out) if inplace and out is not input else out


def _raised_by_mask(
    drop: Callable[[Tensor, Tensor, float], Tensor], mask_shape: Callable[[Tensor], Sequence[int]], on: bool
) -> Callable[..., Tensor]:
    """Dropout as `drop` does it by a mask of the shape `mask_shape(input)`. `on`: the default of `training`."""

    def drop_by_mask(
        input: Tensor, p: float = 0.5, training: bool = on, inplace: bool = False, *, seed_step: Tensor, call: int
    ) -> Tensor:
        if not training or not 0.0 < p < 1.0:
            return dropout_without_draws(input, p, training)
        out = drop(input, keep_mask(seed_step, call, p, mask_shape(input)), p)
        return input.copy_(out) if inplace else out

    return drop_by_mask


def _scale_kept(input: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.where(mask, input * keep_scale(p), 0.0)


def _alpha(input: Tensor, mask: Tensor, p: float) -> Tensor:
    """Alpha dropout by `mask`, which preserves mean and variance of SELU activations."""
    a = 1.0 / math.sqrt((ALPHA * ALPHA * p + 1.0) * (1.0 - p))
    return torch.where(mask, input * a + ALPHA * a * p, ALPHA * a * p - ALPHA * a)


def _features(whole: int | None = None) -> Callable[[Tensor], list[int]]:
    """One draw per channel: torch zeroes input[n, c]; an unbatched input has `whole - 1` dims (None: always batched)."""

    def mask_shape(input: Tensor) -> list[int]:
        leading = input.shape[: 2 if whole is None or input.dim() == whole else 1]
        return [*leading, *[1] * (input.dim() - len(leading))]

    return mask_shape


def _raised_native_dropout(input: Tensor, p: float, train: bool | None, *, seed_step: Tensor, call: int) -> tuple[Tensor, Tensor]:
    if train is False:
        return input, torch.ones(input.shape, dtype=torch.bool, device=input.device)
    return torch.ops.meshc.dropout(input, seed_step, call, p, input.shape, input.shape, [0] * input.dim())


def _torchs(raised: Callable[..., Tensor], inplace: bool = False) -> Callable[..., Tensor]:
    """`raised` with the parameter `train` of torch.dropout and similar functions in the place of `training`."""
    return lambda input, p, train, *, seed_step, call: raised(input, p, train, inplace, seed_step=seed_step, call=call)


def _raised_recurrent(layer: Function) -> Function:
    """A stack of recurrent layers, one after another, with dropout between them: draws in the order of execution."""

    def run_layers(*args: Any, seed_step: Tensor, call: int) -> tuple[Tensor, ...]:
        packed = not isinstance(args[3], bool)  # a packed sequence has its batch sizes as one more argument
        x, sizes, states, weights = (args[0], args[1:2], *args[2:4]) if packed else (args[0], (), *args[1:3])
        biases, count, p, train, both = args[4:9] if packed else args[3:8]
        turned = not packed and args[8]
        x = x.transpose(0, 1) if turned else x
        each, ways = len(weights) // count, 2 if both else 1
        ends: list[Sequence[Tensor]] = []
        for index in range(count):
            rows = slice(index * ways, (index + 1) * ways)
            mine = states[rows] if isinstance(states, Tensor) else [state[rows] for state in states]
            own = list(weights[index * each : (index + 1) * each])
            out = layer(x, *sizes, mine, own, biases, 1, 0.0, train, both, *([] if packed else [False]))
            x, end = out[0], out[1:]
            ends.append(end)
            if index < count - 1:
                x = dropout(x, seed_step, call + index, p)
        x = x.transpose(0, 1) if turned else x
        return (x, *(torch.cat(list(same), 0) for same in zip(*ends, strict=True)))

    return run_layers


_by_features = _raised_by_mask(_scale_kept, _features(), True)
_alpha_dropout = _raised_by_mask(_alpha, lambda input: input.shape, False)
_feature_alpha_dropout = _raised_by_mask(_alpha, _features(), False)

RAISED: dict[Target, Function] = {
    functional.dropout: _raised_dropout,
    torch.dropout: _torchs(_raised_dropout),
    torch.dropout_: _torchs(_raised_dropout, True),
    torch.native_dropout: _raised_native_dropout,
    functional.dropout1d: _raised_by_mask(_scale_kept, _features(3), True),
    functional.dropout2d: _by_features,
    functional.dropout3d: _raised_by_mask(_scale_kept, _features(5), True),
    torch.feature_dropout: _torchs(_by_features),
    torch.feature_dropout_: _torchs(_by_features, True),
    functional.alpha_dropout: _alpha_dropout,
    torch.alpha_dropout: _torchs(_alpha_dropout),
    torch.alpha_dropout_: _torchs(_alpha_dropout, True),
    functional.feature_alpha_dropout: _feature_alpha_dropout,
    torch.feature_alpha_dropout: _torchs(_feature_alpha_dropout),
    torch.feature_alpha_dropout_: _torchs(_feature_alpha_dropout, True),
    **{layer: _raised_recurrent(standing) for layer, standing in recurrent.RAISED.items()},
}
"""Torch function -> the same function with `seed_step` and `call`."""
