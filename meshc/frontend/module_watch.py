"""Change detection for a module at each call: its hashable state, computed again only where a cheap comparison by identity fails.

    watch = ModuleWatch(model)
    watch.state() is watch.state()         as long as nothing changes that decides the program (`module_state.py`)
    model.eval(); watch.state()            another object, which equals an earlier one if the module's state is the same again

The comparison runs at each call, for each module: loops are those of `map` and `chain`, which take a quarter of the time of Python's
own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.frontend.gradient_hooks import hooks_of
from meshc.frontend.module_state import HOOKS, plain_settings, state_of

Held = dict[str, Any]
"""A module's `__dict__`."""

_looked_at: Final = itemgetter("training", "_modules", "_parameters", *HOOKS)
"""A module's mode and dicts."""
_DICTS: Final = 2 + len(HOOKS)
_takes, _backward, _accumulated = map(attrgetter, ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"))


class ModuleState:
    """The state of a module that decides its program, hashed once. Keep only weak references to compare with later: a state holds the
    hooks."""

    __slots__ = ("__weakref__", "_hash", "modules", "parameters")

    def __init__(self, modules: tuple[Hashable, ...], parameters: tuple[Hashable, ...]) -> None:
        """modules: `state_of` each module; parameters: whether they require gradients, and hooks on those."""
        self.modules, self.parameters = modules, parameters
        self._hash = hash((modules, parameters))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleState):
            return NotImplemented
        return self is other or (self.modules == other.modules and self.parameters == other.parameters)


class ModuleWatch:
    """Watches one module with all modules in it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: ModuleState | None = None
        self._places = _ModuleSnapshot([])
        self._settings: list[tuple[Held, str, object]] = []
        """Of modules with plain settings beside their mode, each setting."""
        self._others: list[tuple[nn.Module, tuple[Hashable, ...]]] = []
        """Modules with other state."""
        self._tensors: list[Tensor] = []
        self._gradients: tuple[Hashable, ...] = ()

    def state(self) -> ModuleState:
        """The state now: the object returned before if nothing has changed, with the same modules and parameters under the same names."""
        if self._state is None or not self._holds():
            self._state = self._look()
        return self._state

    def _holds(self) -> bool:
        gradients = self._places.hold() and _gradients(self._tensors)
        return (
            gradients == self._gradients
            and all([held.get(name) is then for held, name, then in self._settings])
            and all([state_of(module) == then for module, then in self._others])
        )

    def _look(self) -> ModuleState:
        modules = list(self.module.modules())
        self._places = _ModuleSnapshot([vars(module) for module in modules])
        states = [(module, state_of(module)) for module in modules]
        plain = [plain_settings(*row) for row in states]
        self._settings = [(vars(module), *row) for module, found in zip(modules, plain, strict=True) for row in (found or {}).items()]
        self._others = [row for row, found in zip(states, plain, strict=True) if found is None]
        found = {id(one): one for module in modules for one in module._parameters.values() if one is not None}
        self._tensors = list(found.values())
        self._gradients = _gradients(self._tensors)
        return ModuleState(tuple(state for _, state in states), self._gradients)


class _ModuleSnapshot:
    """A snapshot of modules: mode, submodules and parameters by dict and name, and numbers of hooks. Its values are kept alive, so that no
    other object can have their identity."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._then: list[Any] = list(chain.from_iterable(map(_looked_at, held)))
        dicts: list[dict[str, object]] = [one for at, one in enumerate(self._then) if at % (1 + _DICTS)]
        self._empty, self._filled = [one for one in dicts if not one], [one for one in dicts if one]
        self._sizes = list(map(len, self._filled))
        self._full = [one for at, one in enumerate(dicts) if one and at % _DICTS < 2]
        self._names = list(chain.from_iterable(self._full))
        self._values = list(chain.from_iterable(map(dict.values, self._full)))
        self._forwards = ["forward" in one for one in held]

    def hold(self) -> bool:
        """Whether all is unchanged, and no module has got a forward of its own."""
        return (
            all(map(is_, chain.from_iterable(map(_looked_at, self._held)), self._then))
            and not any(self._empty)
            and list(map(len, self._filled)) == self._sizes
            and list(chain.from_iterable(self._full)) == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._values))
            and list(map(dict.__contains__, self._held, repeat("forward"))) == self._forwards
        )


def _gradients(parameters: Sequence[Tensor]) -> tuple[Hashable, ...]:
    """Of each parameter whether it requires a gradient; if any has hooks on that, of each the numbers of its own."""
    with torch._C.DisableTorchFunctionSubclass():  # attributes of a DTensor are read in a third of the time
        takes = tuple(map(_takes, parameters))
        if not (any(map(_backward, parameters)) or any(map(_accumulated, parameters))):
            return takes
        return takes, tuple(found and found.numbers for found in map(hooks_of, parameters))
