"""Registry of users' updates for optimizers whose `step` cannot be traced, and the optimizer that runs such an update in its place.

    def state(p):                       return {"exp_avg": torch.zeros_like(p)}
    def update(p, g, state, group):     m = 0.9 * state["exp_avg"] + 0.1 * g;   return p - group["lr"] * m.sign(), {"exp_avg": m}

    meshc.register_update(FusedLion, update, state)

The function is traced in the place of the class's `step`. Everything else stays the optimizer's own: its groups, where a scheduler finds
the rates; its state, by the same names, in `state_dict`; and `meshc.verify` compares with its own steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from meshc.errors import StateError

State: TypeAlias = Mapping[str, Any]
Update: TypeAlias = Callable[[Tensor, Tensor, State, Mapping[str, Any]], tuple[Tensor, State]]


@dataclass(frozen=True)
class RegisteredUpdate:
    """
    update  (parameter, gradient, state, group) -> the new parameter, its new state
    state   parameter -> its state before the first step: tensors and numbers by name
    """

    update: Update
    state: Callable[[Tensor], State]


UPDATES: Final[dict[type, RegisteredUpdate]] = {}
"""Optimizer class -> its registered update; a later registration replaces an earlier one."""


def register_update(optimizer: type[torch.optim.Optimizer], update: Update, state: Callable[[Tensor], State] | None = None) -> None:
    """Say what a step of an optimizer's class does to one parameter, where its own code cannot be traced (a kernel of another library, a
    count that it keeps for itself, values read in Python).

    update  called as update(parameter, gradient, state, group); returns (new parameter, new state). Tensors are of the parameter's global
            shape. `state` is a dict by name; `group` is the entry of `param_groups`, without its parameters: its numbers are read at each
            call, so schedulers act. Written with torch operations, for a parameter by itself; it writes to nothing that it is given
    state   called as state(parameter); returns the state before the first step: zeros, another constant, a copy of the parameter, a number.
            None: there is none

    Classes derived from it are not meant. Raises StateError for what is no optimizer's class.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise StateError(
            f"register_update({optimizer!r}, ...): an update is registered for a class of optimizers\n"
            "  what to do: give a class that is derived from torch.optim.Optimizer"
        )
    UPDATES[optimizer] = RegisteredUpdate(update, (lambda parameter: {}) if state is None else state)


class _RegisteredOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` runs the update that was registered for its class."""

    registered: RegisteredUpdate

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                numbers = {name: value for name, value in group.items() if name != "params"}
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, numbers)

    def _update(self, parameter: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        held = self.state[parameter]
        if not held:
            held.update(self.registered.state(parameter))
        new, after = self.registered.update(parameter.clone(), gradient, dict(held), group)
        for name, value in after.items():
            if isinstance(value, Tensor) and isinstance(held.get(name), Tensor) and held[name].dim():
                held[name].copy_(value)
            else:
                held[name] = value
        parameter.copy_(new)


def with_registered_update(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer to trace: `optimizer` itself, or one that runs the update registered for its class, over the same groups and state."""
    kind = type(optimizer)
    if kind not in UPDATES:
        return optimizer
    names = {"registered": UPDATES[kind], "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: torch.optim.Optimizer = object.__new__(type(kind.__name__, (_RegisteredOptimizer,), names))
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return made
