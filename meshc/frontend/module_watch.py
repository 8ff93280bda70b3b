"""Whether a module is as it was when it was looked at last: a look at each call, which costs a part of finding all out again.

    watch = Watch(model)
    watch.state() is watch.state()         as long as nothing changes that decides the program (`module_state.py`)
    model.eval(); watch.state()            another object, which equals one of before if the module is in all as it was then

It runs at each call, for each module: loops are those of `map` and `chain`, which are a quarter of Python's own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, Final

from torch import Tensor, nn

from meshc.frontend.gradient_hooks import hooks_of
from meshc.frontend.module_state import HOOKS, has_settings, state_of

Held = dict[str, Any]
"""What a module holds: its `__dict__`."""

_looked_at: Final = itemgetter("training", "_modules", "_parameters", *HOOKS)
"""Of each module: its mode, and dicts."""
_DICTS: Final = 2 + len(HOOKS)
_takes: Final = attrgetter("requires_grad")


class State:
    """What of a module decides its program, hashed once. Who keeps one to know it again keeps a weak reference: hooks are in it."""

    __slots__ = ("__weakref__", "_hash", "modules", "parameters")

    def __init__(self, modules: tuple[Hashable, ...], parameters: tuple[Hashable, ...]) -> None:
        """modules: `state_of` each; parameters: of each whether it takes a gradient, and what hangs on that."""
        self.modules, self.parameters = modules, parameters
        self._hash = hash((modules, parameters))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, State):
            return NotImplemented
        return self is other or (self.modules == other.modules and self.parameters == other.parameters)


class Watch:
    """Of one module with all that are in it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._state: State | None = None
        self._places = _Places([])
        self._others: list[tuple[nn.Module, tuple[Hashable, ...]]] = []
        """Modules of which more counts than the mode."""
        self._tensors: list[Tensor] = []
        self._takes: list[bool] = []
        self._hooked: list[tuple[Tensor, Hashable]] = []
        """Parameters that take gradients, and what hangs on these."""

    def state(self) -> State:
        """What it is now: the same object as before, if it is the same, with the same modules and parameters in the same places."""
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

    def _look(self) -> State:
        modules = list(self.module.modules())
        self._places = _Places([vars(module) for module in modules])
        states = [(module, state_of(module)) for module in modules]
        self._others = [row for row in states if not _is_plain(row[0])]
        found = {id(one): one for module in modules for one in module._parameters.values() if one is not None}
        self._tensors = list(found.values())
        self._takes = [one.requires_grad for one in self._tensors]
        rows = list(zip(self._takes, map(_hooks, self._tensors), strict=True))
        self._hooked = [(one, row[1]) for one, row in zip(self._tensors, rows, strict=True) if any(row)]
        return State(tuple(state for _, state in states), tuple(rows))


class _Places:
    """In which mode modules are, which of them, and which parameters, stand where (in which dict, under which name), and how many hooks
    they have. What stood somewhere is held, so that nothing else can have its identity."""

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
        """Whether all is so still, and no module has got a forward of its own."""
        return (
            all(map(is_, chain.from_iterable(map(_looked_at, self._held)), self._then))
            and list(map(len, self._dicts)) == self._sizes
            and list(chain.from_iterable(self._full)) == self._names
            and all(map(is_, chain.from_iterable(map(dict.values, self._full)), self._values))
            and list(map(dict.__contains__, self._held, repeat("forward"))) == self._forwards
        )


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing of it counts but its mode, and whether it has hooks of its user."""
    held = vars(module)
    hooked = any(not hasattr(hook, "of_meshc") for name in HOOKS for hook in held[name].values())
    return not has_settings(module) and "forward" not in held and not hooked


def _hooks(parameter: Tensor) -> Hashable:
    """The numbers of what hangs on a parameter's gradient."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return None
    hooks = hooks_of(parameter)
    return hooks and hooks.numbers
