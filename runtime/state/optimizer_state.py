"""Adoption of the user's optimizer: live parameters and stored state put into its groups and state, as torch would have created them.

optimizer.param_groups[0]["params"][0]    the old parameter  ->  the live DTensor, in place
optimizer.state[parameter]["exp_avg"]     nothing, or the state of a resumed optimizer  ->  a live DTensor over the stored state
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.errors import StateError, join_names
from meshc.ir import layouts
from meshc.ir.keys import key_of
from meshc.ir.sharding import Sharding
from meshc.optimizer.optimizer import (
    AnyOptimizer,
    Optimizers,
    OptimizerSpec,
    Slot,
    attach_state,
    members_of,
    parameters_of,
    replace_parameters,
)
from meshc.optimizer.state_formats import alternative_names, convert_state
from meshc.program.program import Port
from meshc.runtime.state import adoption, moved_experts, ownership

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store
    from meshc.runtime.state.stored_tensor import StoredTensor


def adopt(store: Store, optimizer: AnyOptimizer, ports: Sequence[Port], spec: OptimizerSpec | None = None) -> None:
    """Puts the live parameters into the optimizers' groups, in place, and gives the optimizers state, stored as the ports say.

    ports: of kind state; `of` is the parameter's name, `name` that name, "/" and the slot's. spec: `describe(optimizer)`, from before or
    after the parameters were replaced; it has the initial values of state, which are zeros without it. Existing state of the optimizer is
    taken over: its DTensors, or rank 0's plain tensors. Slots that torch does not know are kept in the store only.
    """
    members = members_of(optimizer)
    fresh_members = refuse_shared(store, members)
    store.forget_states()
    adoption.check_storage(store, [port for port in ports if port.key in store.held])
    mine: dict[str, tuple[Tensor, torch.optim.Optimizer]] = {}
    for member in members:
        mine |= {key: (p, member) for p in parameters_of([member]) if (key := store.parameter_key(p)) is not None}
    slots = _slots(store, spec)
    states: dict[int, dict[Tensor, dict[str, Tensor]]] = {id(member): {} for member in members}
    with torch.no_grad():
        for port in ports:
            parameter = store.find(key_of("parameter", port.of))
            if parameter is None or parameter.key not in mine:
                raise StateError(f"the program keeps {port.name}, but {port.of} is not among the optimizer's parameters")
            old, member = mine[parameter.key]
            held = store.held.get(port.key)
            if held is None:
                name = port.name.removeprefix(f"{port.of}/")
                slot = slots.get((parameter.key, name))
                entries = member.state.get(old, {})
                present = entries.get(name) if slot is None else convert_state(slot, entries, partial(_whole, store))
                held = _hold(store, port, parameter, name, slot, present)
                held.optimizer = weakref.ref(member)
            states[id(member)].setdefault(parameter.live, {})[held.slot] = held.live
    for member in members:
        replaced = {old: store.held[key].live for key, (old, whose) in mine.items() if whose is member}
        attach_state(member, replaced, states[id(member)])
        if member in fresh_members:
            ownership.own_optimizer(member, store)
    forget_other_forms(store, members)
    _update_wrappers(store, optimizer)


def replace_live_parameters(store: Store, optimizer: AnyOptimizer) -> None:
    """Replaces, in optimizers built before the model was compiled, the old parameters by the live ones."""
    for member in members_of(optimizer):
        attach_state(member, {p: store.live(p) for p in parameters_of([member]) if store.parameter_key(p) is not None}, {})
    _update_wrappers(store, optimizer)


def refuse_shared(store: Store, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that the store does not know yet. Raises StateError if one updates a parameter of another optimizer: steps of
    one model may have several optimizers only for disjoint parameters (generator, discriminator). Sends nothing."""
    members = [member for member in optimizers if all(one is not member for one in store.optimizers)]
    if _parameters_of_others(store, members, optimizers) is not None:
        gc.collect()  # a dropped optimizer with a scheduler is in a reference cycle until then
    found = _parameters_of_others(store, members, optimizers)
    if found is not None:
        names, other = found
        raise StateError(
            f"{join_names(names, 4)}: another {other} updates this already\n"
            "  why: a parameter has one optimizer, whose state the model's programs share\n"
            "  what to do: give both steps the same optimizer; or let go of the old one (del optimizer) before a new one is compiled"
        )
    return members


def _parameters_of_others(
    store: Store, members: Sequence[torch.optim.Optimizer], known: Sequence[torch.optim.Optimizer]
) -> tuple[list[str], str] | None:
    """Names of the members' parameters that an optimizer outside `known` updates, and the class of that one; None without any."""
    others = [one for one in store.optimizers if all(one is not member for member in known)]
    held = {key: type(one).__qualname__ for one in others for p in parameters_of([one]) if (key := store.parameter_key(p)) is not None}
    keys = [store.parameter_key(p) for p in parameters_of(members)]
    twice = [key for key in keys if key is not None and key in held]
    return ([store.held[key].name for key in twice], held[twice[0]]) if twice else None


def replacement_state(store: Store, held: StoredTensor) -> object | None:
    """The optimizer's present form of a state that it has replaced, in more or fewer bits; None if there is none. The entries of that form
    are removed later (`forget_other_forms`)."""
    optimizer = None if held.optimizer is None else held.optimizer()
    if optimizer is None or held.fresh is None:
        return None
    return convert_state(held.fresh, optimizer.state.get(store.held[held.of].live, {}), partial(_whole, store))


def forget_other_forms(store: Store, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """After a load: removes other forms of a state, so that optimizers hold each state once."""
    slots: dict[str, list[Slot]] = defaultdict(list)
    for held in store.held.values():
        if held.fresh is not None:
            slots[held.of].append(held.fresh)
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for slot in slots.get(store.parameter_key(parameter) or "", ()):
                for name in alternative_names(slot) if slot.name in entries else ():
                    entries.pop(name, None)


def _whole(store: Store, value: Tensor) -> Tensor:
    """An optimizer's tensor, whole on every rank; a plain tensor is rank 0's, as in `adopt`."""
    if isinstance(value, DTensor):
        return store.transfers.full(value).to(store.device)
    return store.transfers.scatter(value, layouts.whole_sharding(tuple(value.shape)), value.dtype)


def _update_wrappers(store: Store, optimizer: AnyOptimizer) -> None:
    """Replaces parameters in the groups that wrappers of the optimizer have."""
    for wrapper in optimizer.wrappers if isinstance(optimizer, Optimizers) else ():
        listed = [p for group in getattr(wrapper, "param_groups", ()) for p in group["params"]]
        replace_parameters(wrapper, {p: store.live(p) for p in listed})


def initial_state(
    store: Store, sharding: Sharding, shape: tuple[int, ...], dtype: torch.dtype, parameter: StoredTensor, slot: Slot | None
) -> Tensor:
    """A tile of state as torch creates it: zeros, another constant, or a copy of the parameter."""
    if slot is not None and slot.fill is None:
        return parameter.home.reshard(parameter.buffer, parameter.sharding, sharding).to(dtype)
    fill = 0.0 if slot is None or slot.fill is None else slot.fill
    value = torch.full((), fill, dtype=dtype, device=store.device)
    return (parameter.home if shape else store.transfers).take_tile(value.expand(shape), sharding)


def _slots(store: Store, spec: OptimizerSpec | None) -> dict[tuple[str, str], Slot]:
    found: dict[tuple[str, str], Slot] = {}
    for group in () if spec is None else spec.groups:
        for parameter, slots in zip(group.params, group.slots, strict=True):
            key = store.parameter_key(parameter)
            if key is not None:
                found |= {(key, slot.name): slot for slot in slots}
    return found


def _hold(store: Store, port: Port, parameter: StoredTensor, name: str, slot: Slot | None, present: object) -> StoredTensor:
    sharding, home = port.sharding or layouts.whole_sharding(port.shape), parameter.home if port.shape else store.transfers
    if present is None:
        tile = initial_state(store, sharding, port.shape, port.dtype, parameter, slot)
        tile = parameter.as_model(tile, sharding) if slot is not None and slot.fill is None else tile
    elif isinstance(present, DTensor):
        whole = store.transfers.full(present).to(store.device, port.dtype)
        tile = home.take_tile(whole, sharding)
    else:
        whole = present if isinstance(present, Tensor) else torch.tensor(present)
        tile = home.scatter(whole, sharding, port.dtype)
    held = store.hold(port.key, sharding, port.shape, port.dtype, tile, distributed=bool(port.shape), storage=port.storage)
    held.of, held.slot, held.fresh = parameter.key, name, None if slot is None else replace(slot, value=None)
    moved_experts.reorder_new_state(parameter, held)
    return held
