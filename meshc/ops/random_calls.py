"""Which calls of torch's functions draw random numbers, how many, and what stands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshc.ir.functions import Function, Target
from meshc.ops import drawing, dropout, recurrent

_functional = torch.nn.functional
_RECURRENT = tuple(recurrent.RAISED)

RAISED: dict[Target, Function] = {**dropout.RAISED, **drawing.RAISED}
"""Torch function, or a method's name -> the same function with two more keywords, `seed_step` and `call`, built of meshc operators."""

UNKNOWN_COUNT = "how many uniform numbers one of its results takes is not known beforehand"
REFUSED: dict[object, str] = {
    torch.poisson: UNKNOWN_COUNT,
    torch.binomial: UNKNOWN_COUNT,
    "random_": "without bounds it draws from more integers than a float64 tells apart",
}
"""What draws and has no definition, and why."""


def _quiet_rrelu(input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False) -> Tensor:
    return _functional.leaky_relu(input, (lower + upper) / 2, inplace is True)


QUIET: dict[object, Function] = {_functional.rrelu: _quiet_rrelu, torch.rrelu: _quiet_rrelu}
"""What stands for a function that draws, in a call in which it does not; those that are not listed stay."""

RANDOM_CALLS: frozenset[object] = frozenset(target for target in RAISED if target not in _RECURRENT) | frozenset(REFUSED)
"""Torch-level targets that draw whenever they are not switched off; methods by name."""


def is_random(target: Target) -> bool:
    """Whether a target of the torch-level graph (a function, a method's name or a method itself) is made to draw random numbers.

    Attention and recurrent layers, which draw only if their dropout is on, are not among them; `draws` counts those too.
    """
    if isinstance(target, str):
        return target in RANDOM_CALLS
    if issubclass(getattr(target, "__objclass__", object), torch._C.TensorBase):
        return target.__name__ in RANDOM_CALLS
    try:
        return target in RANDOM_CALLS
    except TypeError:  # unhashable
        return False


def draws(target: Target, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> int:
    """How many numbered random calls torch makes for this call of `target`, so that capture and `ReferenceRandom` count alike.

    Dropout that is off, has p = 0 or p = 1, or gets an empty tensor makes none; attention makes one if 0 < dropout_p < 1; a recurrent layer
    one between each two layers. Arguments may be graph nodes, where only their number matters.
    """
    kwargs = kwargs or {}
    name = getattr(target, "__name__", str(target))

    def argument(position: int, key: str, default: object) -> Any:
        return kwargs.get(key, args[position] if position < len(args) else default)

    if name == "scaled_dot_product_attention":
        return int(0.0 < argument(4, "dropout_p", 0.0) < 1.0)
    if target is _functional.multi_head_attention_forward:
        return int(bool(argument(13, "training", True)) and 0.0 < argument(10, "dropout_p", 0.0) < 1.0)
    if target in _RECURRENT:
        first = 4 if isinstance(args[3], bool) else 5  # a packed sequence brings its batch sizes as one more argument
        layers, p, training = args[first : first + 3]
        return (layers - 1) if training and 0.0 < p < 1.0 else 0
    if not is_random(target):
        return 0
    if name == "rrelu":
        return int(bool(argument(3, "training", False)))
    if name == "native_dropout":
        return int(argument(2, "train", True) is not False)
    if "dropout" in name:
        off = (_functional.alpha_dropout, _functional.feature_alpha_dropout)  # off unless asked for
        training = argument(2, "training", kwargs.get("train", target not in off))
        values = argument(0, "input", None)
        return int(bool(training) and 0.0 < argument(1, "p", 0.5) < 1.0 and not (isinstance(values, Tensor) and values.numel() == 0))
    return 1
