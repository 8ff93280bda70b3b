"""First values of a model's parameters by the model's own initialisation, for a model built on `meta`.

    transformers                 model.init_weights(), which calls _init_weights of the model that a module belongs to
    others with init_weights()   model.init_weights()
    any other                    reset_parameters() of each module that has one, the innermost first; then model._init_weights(module)
                                 of each, where the model has such a method
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from meshc.frontend.libraries.stock_weights import without_marks

_RESETS: Final = ("reset_parameters", "_reset_parameters")


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Set a model's first values by its own method."""
    whole: Any = getattr(model, "init_weights", None)
    if callable(whole) and _takes_nothing(whole):
        with without_marks(model):
            whole()
        return
    model.apply(_reset)
    one: Any = getattr(model, "_init_weights", None)
    if callable(one):
        model.apply(one)


def of_one_module(model: nn.Module) -> Callable[[nn.Module], object] | None:
    """The function that initialises one module: `_init_weights` of the outermost module that has it (adapters may wrap that module)."""
    found: Any = next((one for one in model.modules() if callable(getattr(type(one), "_init_weights", None))), None)
    return None if found is None else found._init_weights


def _reset(module: nn.Module) -> None:
    for name in _RESETS:
        method: Any = getattr(module, name, None)
        if callable(method) and _takes_nothing(method):
            method()
            return


def _takes_nothing(function: Callable[..., object]) -> bool:
    """Whether a function can be called without arguments."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True
