"""Hashable Python state of a module that decides its program (mode, hooks, layer settings): another state needs another program.

    training                             train(), eval()
    functions that run with forward      hooks; a forward in the instance's `__dict__`, where Accelerate's mixed precision puts one
    torch's own layers                   the `__constants__` of their classes: p of a Dropout, momentum of a BatchNorm
    adapters of PEFT                     which is active, disabled, merged, and its scaling

This state counts for every program of a model, whether its forward reads it or not; other state counts for programs that have read it
(`read_values.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Final

from torch import nn

from meshc.frontend.libraries import STATE
from meshc.frontend.traced_code import name_of
from meshc.ir.forms import PLAIN

HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
SIZES: Final = frozenset(
    "in_features out_features in1_features in2_features num_features num_embeddings embedding_dim in_channels out_channels num_channels "
    "normalized_shape input_size hidden_size".split()
)
"""Settings that follow from the shapes of parameters."""

_NAMES: Final[weakref.WeakKeyDictionary[type, tuple[str, ...]]] = weakref.WeakKeyDictionary()


class Identity:
    """An object hashed and compared by identity."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def state_of(module: nn.Module) -> tuple[Hashable, ...]:
    """The state of one module, without its children: its mode first."""
    held = vars(module)
    found: tuple[Hashable, ...] = (held["training"],)
    for name in HOOKS:  # this runs at each call, for each module
        hooks = held.get(name)
        if hooks:
            found += tuple((name, _hashable(hook)) for hook in hooks.values() if not hasattr(hook, "of_meshc"))
    if "forward" in held:
        found += (_hashable(held["forward"]),)
    names = _names(type(module))
    return found if not names else (*found, *(_plain(held.get(name)) for name in names))


def _names(kind: type) -> tuple[str, ...]:
    """The attributes that count for a class of modules, without sizes of parameters."""
    found = _NAMES.get(kind)
    if found is not None:
        return found
    names: dict[str, None] = {}
    for owner in kind.__mro__:
        if owner.__module__.startswith("torch.nn."):
            names |= dict.fromkeys(vars(owner).get("__constants__", ()))
        names |= dict.fromkeys(STATE.get(name_of(owner), ()))
    _NAMES[kind] = found = tuple(name for name in names if name not in SIZES)
    return found


def plain_settings(module: nn.Module, state: tuple[Hashable, ...]) -> dict[str, object] | None:
    """The attributes that count for a module, where `state`, its own, is its mode and these, and all are plain values; None for another."""
    held, names = vars(module), _names(type(module))
    found = {name: held.get(name) for name in names}
    alone = len(state) == 1 + len(names) and all(type(value) in PLAIN for value in found.values())
    return found if alone else None


def _plain(value: object) -> Hashable:
    """A setting by its value, since a list or a mapping may be changed in place."""
    if isinstance(value, Mapping):
        return tuple((_hashable(key), _plain(one)) for key, one in value.items())
    if isinstance(value, list | tuple | set):
        items: Iterable[object] = value
        return tuple(map(_plain, items))
    return _hashable(value)


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return Identity(value)
    return value
