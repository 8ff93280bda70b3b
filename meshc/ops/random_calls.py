"""Tables of torch's random functions: meshc functions that replace them, and those refused, with reasons; number of draws of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from meshc.ir.functions import Function, Target
from meshc.ops import dropout, raised_draws, recurrent
from meshc.ops.signatures import bind_with_defaults

_functional = torch.nn.functional
_RECURRENT = tuple(recurrent.RAISED)
SOMETIMES: Final = (_functional.scaled_dot_product_attention, _functional.multi_head_attention_forward, *_RECURRENT)
"""Functions that draw only if their dropout is on."""

RAISED: dict[Target, Function] = {**dropout.RAISED, **raised_draws.RAISED}
"""Torch function, or a method's name -> the same function with two more keywords, `seed_step` and `call`, built of meshc operators."""

UNKNOWN_COUNT = "how many uniform numbers one of its results takes is not known beforehand"
REFUSED: dict[object, str] = {
    torch.poisson: UNKNOWN_COUNT,
    torch.binomial: UNKNOWN_COUNT,
    "random_": "without bounds it draws from more integers than a float64 tells apart",
}
"""Random functions that are refused -> the reason."""


def _quiet_rrelu(input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False, inplace: bool = False) -> Tensor:
    return _functional.leaky_relu(input, (lower + upper) / 2, inplace)


QUIET: dict[object, Function] = {_functional.rrelu: _quiet_rrelu, torch.rrelu: _quiet_rrelu}
"""Random function -> its replacement in a call that draws nothing; functions that are not listed stay."""

RANDOM_CALLS: frozenset[object] = frozenset(target for target in RAISED if target not in _RECURRENT) | frozenset(REFUSED)
"""Torch-level targets that draw whenever they are not switched off; methods by name."""


def is_random(target: Target) -> bool:
    """Whether a target of the torch-level graph (a function, a method's name or a method itself) draws random numbers by definition.

    False for attention and recurrent layers, which draw only if their dropout is on; `draws` counts those too.
    """
    if isinstance(target, str):
        return target in RANDOM_CALLS
    if is_method(target):
        return target.__name__ in RANDOM_CALLS
    try:
        return target in RANDOM_CALLS
    except TypeError:  # unhashable
        return False


def is_method(target: Target) -> bool:
    """Whether `target` is an unbound tensor method, as `torch.Tensor.uniform_`."""
    return issubclass(getattr(target, "__objclass__", object), torch._C.TensorBase)


def draws(target: Target, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> int:
    """How many numbered random calls torch makes for this call of `target`, so that capture and `ReferenceRandom` count alike.

    Dropout that is off, has p = 0 or p = 1, or gets an empty tensor makes none; attention makes one if 0 < dropout_p < 1; a recurrent layer
    one between each two layers. Tensor arguments may be graph nodes.
    """
    name = getattr(target, "__name__", str(target))
    if not is_random(target) and target not in SOMETIMES:
        return 0
    given = bind_with_defaults(name if is_method(target) else target, args, kwargs or {})
    if target in _RECURRENT:
        return (given["num_layers"] - 1) if given["train"] and 0.0 < given["dropout"] < 1.0 else 0
    training = given.get("training", given.get("train", True))
    if "dropout_p" in given:
        return int(bool(training) and 0.0 < given["dropout_p"] < 1.0)
    if name == "native_dropout":
        return int(training is not False)
    if "dropout" in name:
        values = given["input"]
        return int(bool(training) and 0.0 < given["p"] < 1.0 and not (isinstance(values, Tensor) and values.numel() == 0))
    return int(bool(training))
