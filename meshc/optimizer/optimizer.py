"""Translation of a `torch.optim` optimizer to operators of a program, and of their results back to the optimizer.

`describe(optimizer)` returns the specification: state slots of each parameter, numbers that are read at each call, and what the program is
specialised to. `update_nodes` then emits one parameter's update through a callback, so that the same code serves `torch.fx` nodes and
plain tensors:

    spec = describe(optimizer)
    group = spec.group_of(parameter)
    new_param, new_state = update_nodes(group, param, grad, state, numbers, call=lambda op, *args, **kwargs: op(*args, **kwargs))

Adam, AdamW and SGD become the `meshc::` updates. Every other optimizer is *traced*: its own `step` runs once on fake tensors, on a private
copy, with state and numbers as inputs. What Python would have computed on floats (`1 - beta1 ** step`) is computed on 0-dim float64
tensors; where Python branches on data (`if rho > 5`), both branches are traced and joined by `where`; where it branches on a number of the
group (`if weight_decay != 0`), the outcome is a guard, part of the key under which the program was compiled.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshc.errors import CompileError, StateError
from meshc.optimizer import group_counts
from meshc.optimizer.emit import update_nodes
from meshc.optimizer.optimizer_set import AnyOptimizer, Optimizers, members_of, parameters_of, with_wrappers
from meshc.optimizer.registered_updates import UPDATES, with_registered_update
from meshc.optimizer.slots import fresh_slots, is_copy, private_copy, sample_shape, with_one_group, written_numbers
from meshc.optimizer.spec import (
    AS_IT_IS,
    FIRST,
    HIDDEN,
    GroupSpec,
    NumberGuard,
    OptimizerSpec,
    Slot,
    TracedUpdate,
    Training,
    group_flags,
    group_numbers,
    guarded_key,
    is_torchs_own,
    kind_of,
    numbers,
    rates,
    without_hooks,
)
from meshc.optimizer.state_formats import convert_state, refuse_fewer_bits
from meshc.optimizer.trace_update import trace_update

__all__ = [
    "FIRST",
    "HIDDEN",
    "GroupSpec",
    "AnyOptimizer",
    "OptimizerSpec",
    "Optimizers",
    "Slot",
    "attach_state",
    "changes",
    "describe",
    "mark_stepped",
    "members_of",
    "numbers",
    "rates",
    "replace_parameters",
    "update_nodes",
]


def changes(old: Sequence[tuple[str, Hashable]], new: Sequence[tuple[str, Hashable]]) -> list[str]:
    """Differences of two keys, the reasons to recompile, one line each: `group 0: weight_decay != 0: False -> True`."""
    before, after = dict(old), dict(new)
    names = [*before, *(name for name in after if name not in before)]
    return [f"{n}: {before.get(n, 'absent')} -> {after.get(n, 'absent')}" for n in names if before.get(n) != after.get(n)]


# Describe.


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__qualname__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CompileError(
            f"{name} evaluates the model several times in a step, through a closure\n"
            "  why: a compiled step is one forward, one backward and one update\n"
            "  what to do: an optimizer that steps without a closure; or compile the module alone, and step in eager code"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CompileError(
            f"{name} takes sparse gradients, and a program has none\n  what to do: Adam, and sparse=False in the embedding"
        )
    if type(optimizer) in UPDATES:
        return
    parameters = list(inspect.signature(without_hooks(type(optimizer).step)).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed:
        raise CompileError(f"{name}.step needs {', '.join(needed)}. A compiled step calls step() alone: give them defaults.")
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise CompileError(f"{name}: parameter {j} of group {i} has a sparse gradient. Use sparse=False in the embedding.")


def describe(optimizer: AnyOptimizer, keeping: Training = AS_IT_IS) -> OptimizerSpec:
    """Specification of optimizers, which are not changed; those without a `meshc::` update are traced once per shape and dtype in a group.
    `keeping`: how the program stores their state.

    Raises CompileError, naming the optimizer, where its step cannot be expressed: closures, sparse gradients, step counts kept outside the
    state, float() or math functions of data. A user's own class is also run for three steps on small tensors and compared with its trace.
    """
    groups: list[GroupSpec] = []
    for member in members_of(optimizer):
        _refuse(member)
        with _stepping_alone(member):
            first, inner = len(groups), with_registered_update(member)
            groups += [_group(with_one_group(inner, group), i, first + i, keeping) for i, group in enumerate(inner.param_groups)]
    whole = optimizer if isinstance(optimizer, Optimizers) else Optimizers((optimizer,))
    return OptimizerSpec(str(whole), tuple(groups), guarded_key(whole, [g.guards for g in groups]), whole.idle)


@contextmanager
def _stepping_alone(optimizer: Optimizer) -> Iterator[None]:
    """Context in which the step of any other optimizer is an error: the program would lose the update of one that meshc did not find.
    Copies of `optimizer` pass: they run `super().step()`, for which torch has hooks of its own once the class has been used."""

    def refuse(other: Optimizer, *_: object) -> None:
        if is_copy(other):
            return
        name, theirs = type(optimizer).__qualname__, type(other).__qualname__
        raise CompileError(
            f"{name}.step calls {theirs}.step, and no {theirs} lies in {name}'s attributes, where meshc looks for inner optimizers\n"
            f"  what to do: keep it in an attribute (a list or a dict will do), or TrainStep(model, optimizer=[...]) with all that step"
        )

    with register_optimizer_step_pre_hook(refuse):
        yield


def _group(optimizer: Optimizer, position: int, index: int, keeping: Training) -> GroupSpec:
    """The specification of an optimizer's one group; `position`: that of the group in the whole optimizer."""
    (group,), name = optimizer.param_groups, type(optimizer).__qualname__
    kind, params = kind_of(optimizer, group), tuple(group["params"])
    written = written_numbers(optimizer)
    names = tuple(number for number in group_numbers(optimizer, group) if number not in written)
    fresh: dict[tuple[tuple[int, ...], torch.dtype], tuple[Slot, ...]] = {}
    slots: list[tuple[Slot, ...]] = []
    traced: dict[tuple[tuple[int, ...], torch.dtype], TracedUpdate] = {}
    guards: list[NumberGuard] = [NumberGuard("weight_decay", "!=")] if kind != "other" else []
    if kind == "other" and any(p.is_complex() for p in params):
        raise CompileError(f"{name}: group {position} has complex parameters, which only Adam, AdamW and SGD take here.")
    if kind == "other" and not is_torchs_own(optimizer):
        check_against_itself(optimizer, written)
    for p in params:
        signature = (tuple(p.shape), keeping.compute_dtype(p.dtype))
        if signature not in fresh:
            fresh[signature] = fresh_slots(optimizer, *signature) + group_counts.slots(written, group)
            if kind == "other":
                traced[signature], found = trace_update(optimizer, *signature, fresh[signature])
                guards += [g for g in found if g not in guards]
        stored = keeping.stored_slots(fresh[signature], tuple(p.shape), p.dtype)
        slots.append(_with_values(stored, optimizer.state.get(p), name, keeping, p.dtype))
    flags = group_flags(optimizer, group)
    return GroupSpec(index, kind, name, flags, names, tuple(guards), params, tuple(slots), traced, keeping)


def _with_values(
    slots: Sequence[Slot], state: Mapping[str, float | Tensor | None] | None, optimizer: str, keeping: Training, param: torch.dtype
) -> tuple[Slot, ...]:
    """Slots with the tensors of a resumed optimizer, in the dtypes of these tensors unless `keeping` changes how state is stored.
    Raises StateError for state in fewer bits than the program would store, unless `keeping` requests that."""
    if not state:
        return tuple(slots)
    here = {name: one for name, one in state.items() if not isinstance(one, DTensor)}
    if keeping.optimizer_state is None:
        for slot in slots:
            refuse_fewer_bits(optimizer, slot, state, param)
    values = {slot.name: convert_state(slot, state if slot.name in state else here, _identity) for slot in slots}
    present = any(values[slot.name] is not None for slot in slots if not slot.is_hidden)
    held: list[Slot] = []
    for slot in slots:
        value = values[slot.name]
        if slot.name == FIRST and present:
            held.append(replace(slot, fill=0.0))
        elif value is None:
            held.append(slot)
        else:
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=slot.dtype)  # type: ignore[arg-type]
            held.append(replace(slot, dtype=slot.dtype if keeping != AS_IT_IS else tensor.dtype, value=tensor))
    return tuple(held)


def _identity(value: Tensor) -> Tensor:
    return value


# Back to the live optimizer.


def attach_state(optimizer: Optimizer, params: Mapping[Tensor, Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Replace parameters in place and attach their state.

    `params` maps an old parameter to the new one; `states` maps a parameter, old or new, to its slots by name. Order, other entries of the
    groups, and state that is not replaced stay; hidden slots are left out, so that `optimizer.state` has torch's own form.
    """
    replaced = {id(p): params.get(p, p) for p in parameters_of([optimizer])}
    new = {id(p) for p in replaced.values()}
    strangers = [p for p in params if id(p) not in replaced] + [p for p in states if id(p) not in replaced and id(p) not in new]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:4])
        raise StateError(
            f"{type(optimizer).__qualname__}: {len(strangers)} parameters (shapes {shapes}) are not in its groups. "
            "Build the optimizer from the parameters of the model that is compiled."
        )
    replace_parameters(optimizer, params)
    kept = list(optimizer.state.items())
    optimizer.state.clear()
    for old, state in kept:
        optimizer.state[replaced.get(id(old), old) if isinstance(old, Tensor) else old] = state
    for p, slots in states.items():
        optimizer.state[replaced.get(id(p), p)].update({name: value for name, value in slots.items() if not name.startswith(HIDDEN)})


def replace_parameters(optimizer: object, params: Mapping[Tensor, Tensor]) -> None:
    """Replace old parameters by new ones, in place, in an optimizer's groups or in the groups that a wrapper lists."""
    for group in getattr(optimizer, "param_groups", ()):
        group["params"][:] = [params.get(p, p) for p in group["params"]]


def mark_stepped(optimizer: AnyOptimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped; torch sets the same flag in the `step` that they wrap."""
    for one in with_wrappers(optimizer):
        one._opt_called = True  # type: ignore[attr-defined]


# Comparison of a user's optimizer with its own trace on small tensors, for effects that one parameter cannot show.
#
# Two parameters take three steps together, eager and traced: an update that couples parameters, or that counts where tracing did not look,
# differs. In a fourth the last one's gradient is not finite: a step that then leaves out all of them moves the others in the trace alone.


_STEPS = 3
_WITHIN = 1e-5
"""Relative tolerance: of a parameter's largest change, or of the largest magnitude of a state."""


def check_against_itself(optimizer: Optimizer, written: Sequence[str]) -> None:
    """Raises CompileError where steps of the one group differ from their trace. `written`: the numbers of the group that a step sets."""
    shapes = _sample_shapes(optimizer)
    if not shapes:
        return
    pair = _Pair(optimizer, written, shapes)
    for _ in range(_STEPS):
        pair.step()
    pair.compare()
    pair.compare_behind_a_gradient_that_is_not_finite()


def _sample_shapes(optimizer: Optimizer) -> list[tuple[int, ...]]:
    """Shapes of two parameters or more, one for each number of dims that occurs in the group."""
    params = optimizer.param_groups[0]["params"]
    firsts = [next(p for p in params if p.dim() == rank) for rank in sorted({p.dim() for p in params})]
    shapes = [sample_shape(optimizer, tuple(p.shape), torch.float64) for p in firsts]
    return [shape for shape in (shapes * 2)[: max(2, len(shapes))] if math.prod(shape)]


class _Pair:
    """Small parameters of one group, stepped by the optimizer's own code, and the same parameters updated one by one by its trace."""

    def __init__(self, optimizer: Optimizer, written: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        self.name = type(optimizer).__qualname__
        self.generator = torch.Generator().manual_seed(0)
        self.eager = [nn.Parameter(self._draw(shape)) for shape in shapes]
        self.twin = private_copy(optimizer, self.eager[0], {}, defaultdict(dict))
        self.twin.param_groups[0]["params"] = self.eager
        self.given = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers(optimizer)[0].items()}
        self.mine = [p.detach().clone() for p in self.eager]
        counts = group_counts.slots(written, optimizer.param_groups[0])
        self.slots = [fresh_slots(optimizer, shape, torch.float64) + counts for shape in shapes]
        traced = {
            (shape, torch.float64): trace_update(optimizer, shape, torch.float64, slots)[0]
            for shape, slots in zip(shapes, self.slots, strict=True)
        }
        self.spec = GroupSpec(0, "other", self.name, (), tuple(self.given), (), (), (), traced)
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
