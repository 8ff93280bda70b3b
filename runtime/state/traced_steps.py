"""Traced optimizer steps on DTensors, for optimizers whose own code cannot take DTensors, in a user's loop or the Trainer.

    state["row"] = torch.zeros(grad.shape[:-1])      no DTensor: whole on every rank, which gathers for it (Shampoo)
    grad.norm(dim=-1, keepdim=True).square_()        of a partial value, not yet reduced over ranks (torch's Adafactor)

Such optimizers keep state that is not shaped like its parameter. Their update of a parameter is traced, as for a compiled step, and run
operator by operator on DTensors; the class's own `step` then finds no parameters. State like the parameter is sharded like it, other state
as the first step leaves it: for a matrix split by rows, Adafactor's row state is split and its column state whole. Operators without a rule
in torch (`eigh`) are computed whole on every rank.

A class that cannot be traced steps by its own code, after a warning that names cheaper ways.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from meshc.errors import CompileError
from meshc.ir import layouts, trees
from meshc.ir.schemas import RESHAPES
from meshc.optimizer.find_optimizers import inner_optimizers
from meshc.optimizer.group_counts import number_of
from meshc.optimizer.optimizer import FIRST, GroupSpec, OptimizerSpec, Slot, describe, numbers, parameters_of, update_nodes
from meshc.optimizer.registered_updates import UPDATES
from meshc.optimizer.slots import fresh_copy, fresh_slots, sample_shape, with_one_group
from meshc.optimizer.spec import kind_of
from meshc.runtime.state.stored_tensor import copy_if_shared, memory_of

_SPECS: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerSpec]] = weakref.WeakKeyDictionary()
"""Traces of the optimizers that step this way."""

_HANDLES: Final[weakref.WeakKeyDictionary[torch.optim.Optimizer, int]] = weakref.WeakKeyDictionary()
"""Ids of the hooks on these optimizers."""


def take_over(optimizer: torch.optim.Optimizer) -> None:
    """Before the first step of an optimizer of DTensors: if its own code cannot take DTensors, makes it step by its trace."""
    if not _keeps_other_state(optimizer):
        return
    try:
        _spec(optimizer)
    except CompileError as error:
        name, why = type(optimizer).__qualname__, str(error).splitlines()[0]
        warnings.warn(
            f"{name} keeps state that is not like its parameters, which are split over ranks, and its step cannot be traced: {why}\n"
            f"  why it matters: {name}.step goes on by its own code: plain state is whole on every rank, which gathers for it, and\n"
            f"  torch refuses operators for which DTensors have no rule\n"
            f"  what to do: meshc.TrainStep(model, optimizer=...), or meshc.register_update({name}, update, state)",
            stacklevel=5,  # who calls `step`
        )
        return
    _HANDLES[optimizer] = optimizer.register_step_pre_hook(_step).id


def come_last(optimizer: torch.optim.Optimizer) -> None:
    """Moves the hook behind hooks registered since, which may change gradients."""
    hooks = optimizer._optimizer_step_pre_hooks
    number = _HANDLES.get(optimizer)
    if number is not None and number in hooks:
        hooks[number] = hooks.pop(number)


def _keeps_other_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some state is neither a number nor like its parameter; True for any class with a registered update."""
    if type(optimizer) in UPDATES:
        return True
    if inner_optimizers(optimizer):
        return False  # wrapped optimizers step by their own `step`
    for group in optimizer.param_groups:
        alone = with_one_group(optimizer, group)
        signatures = {(tuple(p.shape), p.dtype) for p in group["params"]} if kind_of(optimizer, group) == "other" else ()
        try:
            samples = {(sample_shape(alone, *one), one[1]) for one in signatures}
            if any(slot.shape == "other" for one in samples for slot in fresh_slots(alone, *one)):
                return True
        except CompileError:
            return False  # a closure, or anything else that a sample does not show
    return False


def _spec(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """The traces of an optimizer, for its present parameters and the numbers that its Python code branches on."""
    known, present = _SPECS.get(optimizer), [*map(id, parameters_of([optimizer]))]
    if known is not None and [id(p) for group in known.groups for p in group.params] == present and known.key_of(optimizer) == known.key:
        return known
    found = describe(optimizer)
    if any(number_of(slot) for group in found.groups for slots in group.slots for slot in slots):
        raise CompileError("it counts in its groups")
    _SPECS[optimizer] = found.of_live(lambda parameter: parameter)  # which holds no state
    return _SPECS[optimizer]


def _step(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Step pre-hook: steps by the trace, and passes a copy without parameters to the class's own code, which returns the result."""
    passed = dict(kwargs)
    closure = args[1] if len(args) > 1 else passed.get("closure")
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
        passed["closure"] = lambda: loss
    with torch.no_grad():
        for group, values in zip(_spec(optimizer).groups, numbers(optimizer), strict=True):
            for parameter, slots in zip(group.params, group.slots, strict=True):
                if parameter.grad is not None:
                    _update(group, slots, parameter, optimizer.state[parameter], values)
    idle = fresh_copy(optimizer, defaultdict(lambda: torch.empty(0)))
    for entries in idle.param_groups:
        entries["params"] = []
    return (idle,), passed


def _update(group: GroupSpec, slots: Sequence[Slot], parameter: Tensor, state: dict[str, Any], values: Mapping[str, float]) -> None:
    held = {slot.name: _state_before_step(slot, state, parameter) for slot in slots}
    given = {name: torch.tensor(value, dtype=torch.float64, device=parameter.device) for name, value in values.items()}
    assert parameter.grad is not None
    new, after = update_nodes(group, parameter, parameter.grad, held, given, partial(_call, parameter), like=parameter)
    taken = {memory_of(one) for one in (parameter, parameter.grad, *held.values())}
    new = copy_if_shared(_place_result(new, parameter, like=True), taken)
    kept = {slot.name: slot.shape == "like_param" for slot in slots if slot.name != FIRST}
    left = {name: copy_if_shared(_place_result(after[name], held[name], like), taken) for name, like in kept.items()}
    parameter.copy_(new)
    for name, value in left.items():
        if held[name] is state.get(name) and _placements(held[name]) == _placements(value):
            held[name].copy_(value)
        else:
            state[name] = value


def _state_before_step(slot: Slot, state: Mapping[str, Any], parameter: Tensor) -> Tensor:
    """A parameter's state before the step; the initial state of the class, if there is none."""
    if slot.name == FIRST:
        return torch.tensor(0.0 if state else 1.0, dtype=slot.dtype, device=parameter.device)
    found = state.get(slot.name)
    if found is None:
        found = slot.initial(parameter)
    if not isinstance(found, Tensor):
        found = torch.tensor(found, dtype=slot.dtype)
    if found.dtype != slot.dtype or found.device != parameter.device:
        found = found.to(parameter.device, slot.dtype)
    return _on_mesh(parameter, found)


def _call(parameter: Tensor, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One operator of an update, with results as DTensors on the parameter's mesh."""
    if "device" in kwargs:
        kwargs["device"] = parameter.device
    if op in RESHAPES and isinstance(args[0], DTensor) and sum(placement.is_shard() for placement in args[0].placements) > 1:
        args = _whole(args[0]), *args[1:]  # torch's rule assumes one axis per dim
    try:
        result = op(*args, **kwargs)
    except NotImplementedError:  # torch has no rule for it
        result = op(*trees.map_leaves(_whole, args), **trees.map_leaves(_whole, kwargs))
    return tuple(_on_mesh(parameter, one) for one in result) if isinstance(result, tuple | list) else _on_mesh(parameter, result)


def _on_mesh(parameter: Tensor, value: Any) -> Any:
    """A value as a DTensor on the parameter's mesh: a created or loaded tensor is replicated, a partial one is reduced at once, since few
    rules of torch take partial operands. Numbers stay as they are."""
    if isinstance(value, DTensor):
        wanted = [Replicate() if isinstance(placement, Partial) else placement for placement in value.placements]
        return value.redistribute(placements=wanted) if wanted != list(value.placements) else value
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or not value.dim():
        return value
    return layouts.dtensor_of_whole(value, parameter.device_mesh)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _place_result(value: Tensor, before: Tensor, like: bool) -> Tensor:
    """A result as it is stored: a number whole, a tensor like the parameter with its placements, any other as computed."""
    if not isinstance(value, DTensor) or not value.dim():
        return _whole(value)
    return value.redistribute(placements=before.placements) if like and isinstance(before, DTensor) else value


def _placements(value: Tensor) -> object:
    return value.placements if isinstance(value, DTensor) else None
