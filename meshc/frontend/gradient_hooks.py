"""Users' hooks on a parameter's gradient, as functions of the gradient.

    w.register_hook(lambda g: 0.1 * g)                               gradient -> gradient
    w.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1, 1))   parameter, whose `.grad` it changes

In a step the hooks run on the whole gradient of the whole batch, after backward and before clipping; here on plain tensors, for one
device. Random numbers (noise) that a hook draws are draws of the step under a name of the parameter, the same on every mesh.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshc.errors import CompileError
from meshc.frontend.reference_random import ReferenceRandom, Tile
from meshc.ir import Source
from meshc.ir.functions import Function
from meshc.ops import random
from meshc.ops.state_rounding import call_named
from meshc.optimizer.traced_numbers import HeldGradients


@dataclass(frozen=True)
class Hooks:
    """The hooks of one parameter, in the order in which autograd runs them: on its gradient, then on the parameter after accumulation.

    numbers  torch's id of each hook: a hook that is removed and registered again has another
    """

    of_gradient: tuple[Function, ...]
    of_parameter: tuple[Function, ...]
    numbers: tuple[int, ...] = ()

    def __call__(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """The gradient after all hooks, which may change `gradient` in place. Raises CompileError for hooks that torch or a step
        refuses."""
        for hook in self.of_gradient:
            made = hook(gradient)
            gradient = gradient if made is None else made
        if self.of_parameter:
            held = HeldGradients((parameter, gradient))
            with held, register_optimizer_step_pre_hook(_refuse_step):
                for hook in self.of_parameter:
                    if hook(parameter) is not None:
                        raise CompileError(f"{_name(hook)} returns something: torch refuses a hook of a parameter that does")
            made = held.grads[id(parameter)][1]
            if made is None:
                raise CompileError(f"{self.names()} takes the gradient away: a step updates each parameter that has one")
            gradient = made
        return gradient

    def names(self) -> str:
        """The hooks in messages: function name and line of each."""
        return ", ".join(_name(hook) for hook in (*self.of_gradient, *self.of_parameter))


def hooks_of(parameter: Tensor) -> Hooks | None:
    """The hooks of a parameter; None if it has none."""
    first, second = _table(parameter, "_backward_hooks"), _table(parameter, "_post_accumulate_grad_hooks")
    if not first and not second:
        return None
    return Hooks(tuple(first.values()), tuple(second.values()), (*first, *second))


def hooks_in(module: nn.Module) -> dict[str, Hooks]:
    """Hooks by parameter name, for parameters that have some."""
    return {name: hooks for name, parameter in module.named_parameters() if (hooks := hooks_of(parameter)) is not None}


def share_hooks(old: Tensor, new: Tensor) -> None:
    """Hooks of `old` become hooks of `new` too; handles (`handle.remove()`) act on both."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if _table(old, name):
            setattr(new, name, getattr(old, name))


def _table(parameter: Tensor, name: str) -> Mapping[int, Function]:
    found: Mapping[int, Function] | None = getattr(parameter, name, None)
    return found or {}


def _name(hook: Function) -> str:
    code = getattr(inspect.unwrap(hook), "__code__", None)
    place = "" if code is None else f" ({Source(code.co_filename, code.co_firstlineno)})"
    return f"{getattr(hook, '__qualname__', type(hook).__qualname__)}{place}"


# Draws.


class Drawing(ReferenceRandom):
    """Answers random calls of a parameter's hooks in a step; `seed_step` is (seed, step), or the trace's tensor of both."""

    def __init__(self, name: str, seed_step: Tensor) -> None:
        super().__init__(0)
        self.name, self.seed_step = name, seed_step

    def next(self, func: Any, shape: Sequence[int], device: torch.device | None) -> tuple[Tensor, int, Tile]:
        call = call_named(f"{self.name}/hook/{self.calls}")
        self.drawn.append((str(func), tuple(shape)))
        return self.seed_step, call, (tuple(shape), tuple(shape), [0] * len(shape))


def apply_hooks(module: nn.Module, hooks: Mapping[str, Hooks], seed: int, step: int) -> None:
    """On one device: replace the gradients of a module by the results of `hooks`."""
    for name, parameter in module.named_parameters():
        if name in hooks and parameter.grad is not None:
            with torch.no_grad(), Drawing(name, random.seed_step(seed, step, "cpu")):
                parameter.grad = hooks[name](parameter, parameter.grad)


def _refuse_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Refuses the step of a hook that steps an optimizer as gradients arrive."""
    raise CompileError(
        f"a hook steps {type(optimizer).__qualname__}, once a gradient is there\n"
        "  why: a compiled step updates parameters itself, each as soon as its gradient is whole, where nothing is clipped\n"
        "  what to do: take the hook out, and give the optimizer to TrainStep(optimizer=...)"
    )
