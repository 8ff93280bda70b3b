"""Comparison of a user's optimizer with its own trace on small tensors, for effects that one parameter cannot show.

Two parameters take three steps together, eager and traced: an update that couples parameters, or that counts where tracing did not look,
differs. In a fourth the last one's gradient is not finite: a step that then leaves out all of them moves the others in the trace alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshc.errors import CompileError
from meshc.optimizer import group_counts
from meshc.optimizer.emit import update_nodes
from meshc.optimizer.slots import fresh_slots, private_copy, sample_shape
from meshc.optimizer.spec import GroupSpec, numbers, without_hooks
from meshc.optimizer.trace_update import trace_update

_STEPS = 3
_WITHIN = 1e-5
"""Relative tolerance: of a parameter's largest change, or of the largest magnitude of a state."""


def check_against_itself(optimizer: torch.optim.Optimizer, index: int, written: Sequence[str]) -> None:
    """Raises CompileError where steps of group `index` differ from their trace. `written`: the numbers of the group that a step sets."""
    shapes = _sample_shapes(optimizer, index)
    if not shapes:
        return
    pair = _Pair(optimizer, index, written, shapes)
    for _ in range(_STEPS):
        pair.step()
    pair.compare()
    pair.compare_behind_a_gradient_that_is_not_finite()


def _sample_shapes(optimizer: torch.optim.Optimizer, index: int) -> list[tuple[int, ...]]:
    """Shapes of two parameters or more, one for each number of dims that occurs in the group."""
    params = optimizer.param_groups[index]["params"]
    firsts = [next(p for p in params if p.dim() == rank) for rank in sorted({p.dim() for p in params})]
    shapes = [sample_shape(optimizer, index, tuple(p.shape), torch.float64) for p in firsts]
    return [shape for shape in (shapes * 2)[: max(2, len(shapes))] if math.prod(shape)]


class _Pair:
    """Small parameters of one group, stepped by the optimizer's own code, and the same parameters updated one by one by its trace."""

    def __init__(self, optimizer: torch.optim.Optimizer, index: int, written: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        self.name = type(optimizer).__qualname__
        self.generator = torch.Generator().manual_seed(0)
        self.eager = [torch.nn.Parameter(self._draw(shape)) for shape in shapes]
        self.twin = private_copy(optimizer, index, self.eager[0], {}, defaultdict(dict))
        self.twin.param_groups[0]["params"] = self.eager
        self.given = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers(optimizer)[index].items()}
        self.mine = [p.detach().clone() for p in self.eager]
        counts = group_counts.slots(written, optimizer.param_groups[index])
        self.slots = [fresh_slots(optimizer, index, shape, torch.float64) + counts for shape in shapes]
        traced = {
            (shape, torch.float64): trace_update(optimizer, index, shape, torch.float64, slots)[0]
            for shape, slots in zip(shapes, self.slots, strict=True)
        }
        self.spec = GroupSpec(index, "other", self.name, (), tuple(self.given), (), (), (), traced)
        self.states = [{slot.name: slot.initial(p) for slot in slots} for slots, p in zip(self.slots, self.mine, strict=True)]
        self.start = [p.clone() for p in self.mine]

    def _draw(self, shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def step(self) -> None:
        gradients = [self._draw(p.shape) for p in self.eager]
        self._step_eager(gradients)
        for i, gradient in enumerate(gradients):
            self.mine[i], self.states[i] = update_nodes(self.spec, self.mine[i], gradient, self.states[i], self.given, _call)

    def _step_eager(self, gradients: Sequence[Tensor]) -> None:
        for p, gradient in zip(self.eager, gradients, strict=True):
            p.grad = gradient.clone()
        with torch.no_grad():
            without_hooks(type(self.twin).step)(self.twin)

    def compare(self) -> None:
        for i, (p, before) in enumerate(zip(self.eager, self.start, strict=True)):
            self._same(p.detach(), self.mine[i], (p.detach() - before).abs().max().item(), "parameter moved by")
            state = self.twin.state.get(p, {})
            for slot in self.slots[i]:
                if slot.shape != "other" and slot.name in state:
                    held = torch.as_tensor(state[slot.name]).to(torch.float64)
                    self._same(held, self.states[i][slot.name], held.abs().max().item(), f"largest number of state[{slot.name!r}] is")

    def _same(self, eager: Tensor, traced: Tensor, size: float, what: str) -> None:
        wrong = (eager - traced).abs().max().item()
        if not wrong <= _WITHIN * size:
            raise CompileError(
                f"{self.name}: after three steps on small tensors its traced update differs by {wrong:.3g} where the {what} {size:.3g}\n"
                "  why: a compiled step updates each parameter by itself, of its own gradient and state; a step that couples parameters\n"
                "  (a norm of several), draws random numbers, or counts elsewhere cannot be compiled\n"
                "  what to do: a norm of gradients by TrainStep(clip_grad_norm=...), of all or by group; counts in\n"
                "  optimizer.state[parameter] or in the group; or compile the module itself, and step in eager code"
            )

    def compare_behind_a_gradient_that_is_not_finite(self) -> None:
        """One step more, with a non-finite gradient of the last parameter: others must step. Skipped if the eager step raises."""
        before = [p.detach().clone() for p in self.eager]
        gradients = [self._draw(p.shape) for p in self.eager]
        gradients[-1].fill_(math.nan)
        try:
            self._step_eager(gradients)
        except RuntimeError:  # a decomposition that rejects NaN
            return
        for p, old, gradient, state in zip(self.eager[:-1], before, gradients, self.states, strict=False):
            new, _ = update_nodes(self.spec, old, gradient, state, self.given, _call)
            moved = (new - old).abs().max().item()
            if not (p.detach() - new).abs().max().item() <= _WITHIN * moved:
                raise CompileError(
                    f"{self.name}.step leaves out (or changes) a parameter's update where the gradient of another is not finite\n"
                    "  why: a compiled step updates each parameter by itself, and would update those whose gradients are finite\n"
                    "  what to do: decide for each parameter by its own gradient; or compile the module itself, and step in eager code"
                )


def _call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)
