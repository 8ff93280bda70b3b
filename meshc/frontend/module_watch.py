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

from torch import Tensor, nn

from meshc.frontend.gradient_hooks import hooks_of
from meshc.frontend.module_state import HOOKS, state_of

Held = dict[str, Any]
"""A module's `__dict__`."""

_looked_at: Final = itemgetter("training", "_modules", "_parameters", *HOOKS)
"""A module's mode and dicts."""
_DICTS: Final = 2 + len(HOOKS)
_takes: Final = attrgetter("requires_grad")


class ModuleState:
    """The state of a module that decides its program, hashed once. Keep only weak references to compare with later: a state holds the
    hooks."""

    __slots__ = ("__weakref__", "_hash", "modules", "parameters")

    def __init__(self, modules: tuple[Hashable, ...], parameters: tuple[Hashable, ...]) -> None:
        """modules: `state_of` each module; parameters: for each, whether it requires a gradient, and its hooks."""
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
        self._others: list[tuple[nn.Module, tuple[Hashable, ...]]] = []
        """Modules with more state than their mode."""
        self._tensors: list[Tensor] = []
        self._takes: list[bool] = []
        self._hooked: list[tuple[Tensor, Hashable]] = []
        """Parameters that require gradients or have hooks, and the hooks."""

    def state(self) -> ModuleState:
        """The state now: the object returned before if nothing has changed, with the same modules and parameters under the same names."""
        if self._state is None or not self._holds():
            self._state = self._look()
        return self._state

    def _holds(self) -> bool:
        return (
            self._places.hold()
            and list(map(_takes, self._tensors)) == self._takes
            and all(_hooks(parameter) == hooks for parameter, hooks in self._hooked)
            and all(state_of(module) == then for module, then in self._others)
        )

    def _look(self) -> ModuleState:
        modules = list(self.module.modules())
        self._places = _ModuleSnapshot([vars(module) for module in modules])
        states = [(module, state_of(module)) for module in modules]
        self._others = [row for row in states if len(row[1]) > 1]
        found = {id(one): one for module in modules for one in module._parameters.values() if one is not None}
        self._tensors = list(found.values())
        self._takes = [one.requires_grad for one in self._tensors]
        rows = list(zip(self._takes, map(_hooks, self._tensors), strict=True))
        self._hooked = [(one, row[1]) for one, row in zip(self._tensors, rows, strict=True) if any(row)]
        return ModuleState(tuple(state for _, state in states), tuple(rows))


class _ModuleSnapshot:
    """A snapshot of modules: mode, submodules and parameters by dict and name, and numbers of hooks. Its values are kept alive, so that no
    other object can have their identity."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._held = held
        self._then: list[Any] = list(chain.from_iterable(map(_looked_at, held)))
        self._dicts: list[dict[str, object]] = [one for at, one in enumerate(self._then) if at % (1 + _DICTS)]
        self._sizes = list(map(len, self._dicts))
        self._full = [one for at, one in enumerate(self._dicts) if one and at % _DICTS < 2]
        self._names = list(chain.from_iterable(self._full))
        self._values = list(chain.from_iterable(map(dict.values, self._full)))
        self._forwards = ["forward" in one for one in held]

    def hold(self) -> bool:
        """Whether all is unchanged, and no module has got a forward of its own."""
        return (
            all(map(is_, chain.from_iterable(map(_looked_at, self._held)), self._then))
            and list(map(len, self._dicts)) == self._sizes
            and list(chain.from_iterable(self._full)) == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._values))
            and list(map(dict.__contains__, self._held, repeat("forward"))) == self._forwards
        )


def _hooks(parameter: Tensor) -> Hashable:
    """The numbers of the hooks on a parameter's gradient."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return None
    hooks = hooks_of(parameter)
    return hooks and hooks.numbers
