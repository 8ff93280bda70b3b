"""Refusal of models that changed since compilation or differ between ranks, for a store; places of tensors, marks of missing values."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshc import environment
from meshc.errors import StateError, join_names, lines_of
from meshc.frontend.admission import refuse_module
from meshc.ir import layouts
from meshc.ir.keys import key_of
from meshc.program.program import Port
from meshc.runtime.agreement.compare import first_other

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store
    from meshc.runtime.state.stored_tensor import StoredTensor

FUNCTIONAL: Final = ("torch._functorch.functional_call", "torch.nn.utils.stateless")
"""Modules of torch whose functions replace parameters for the time of a call."""

SAMPLED: Final = 256
"""Values of each tensor that go into a digest; up to twice as many."""

_FIRST_VALUES: Final[WeakKeyDictionary[dist.ProcessGroup, list[list[str]]]] = WeakKeyDictionary()
"""By the group of all ranks: for each adopted model, the digests of its first values, by rank."""

Place = tuple[str, nn.Module, str]
"""Place of a tensor in a model: key of its port, module, name in the module."""


def tensors_of(model: nn.Module) -> list[tuple[Tensor, list[Place]]]:
    """Every parameter and buffer once, with all of its places."""
    found: dict[int, tuple[Tensor, list[Place]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for kind, members in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in members.items():
                if tensor is not None:
                    key = f"{path}.{name}".lstrip(".")
                    found.setdefault(id(tensor), (tensor, []))[1].append((f"{kind}:{key}", module, name))
    return list(found.values())


def check_ports(ports: Iterable[Port], tensors: Mapping[str, Tensor]) -> None:
    faults = [f"{port.key} is not in the model" for port in ports if port.key not in tensors]
    for port in ports:
        tensor = tensors.get(port.key)
        if tensor is not None and (tuple(tensor.shape), tensor.dtype) != (port.shape, port.dtype):
            faults.append(f"{port.name} is {tensor.dtype} {list(tensor.shape)}; the program is for {port.dtype} {list(port.shape)}")
    if faults:
        raise StateError("the model is not the one that was compiled:\n    " + "\n    ".join(faults))


def check_storage(store: Store, ports: Iterable[Port]) -> None:
    """Raises StateError where a port requires another storage than the present one."""
    faults = []
    for port in ports:
        held = store.find(port.key)
        if held is None:
            faults.append(f"    {port.name}: was not there when the model was first compiled")
        elif port.kind in ("parameter", "state") and port.storage != held.storage:
            faults.append(f"    {port.name}: lies on the {held.storage}, wanted on the {port.storage}")
        elif port.sharding is not None and not layouts.same_layout(port.sharding, held.sharding, store.mesh):
            faults.append(f"    {held.name}: stored as {held.sharding}, wanted as {port.sharding}")
    if faults:
        raise StateError(
            "this model has a program already, and its programs share one storage, which does not suit the new one:\n"
            + "\n".join(faults)
            + "\n  what to do: give both programs plans that store alike; the first to be compiled decides"
        )


def refuse_converted(stored: Iterable[StoredTensor]) -> None:
    """Raises StateError if `half()`, `to(...)` or the like has converted a compiled model: the program's memory is as before."""
    faults = []
    for held in stored:
        now = None if held.of else held.current()
        if isinstance(now, Tensor) and (now.dtype, now.device.type) != (held.dtype, held.buffer.device.type):
            faults.append(f"{held.name} is {now.dtype} on {now.device.type}, the program's is {held.dtype} on {held.buffer.device.type}")
    if faults:
        raise StateError(
            f"the model was converted after it was compiled:\n    {lines_of(faults, 4)}\n"
            "  why: the program computes with the tensors that meshc.compile has put into the model, in their dtype and place\n"
            "  what to do: convert the model before meshc.compile; for lower precision in a part of it, torch.autocast around the call"
        )


def refuse_swapped(model: nn.Module, stored: Iterable[StoredTensor]) -> None:
    """Raises StateError for tensors that replace parameters for the time of a call, or come from another library that shards parameters:
    the program would take them for new values."""
    swapped = [held for held in stored if not held.of and held.current() is not held.live]
    if not swapped:
        return
    refuse_module(model, adopted=True)  # fully_shard changes classes
    there = [held for held in swapped if held.current() is not None]
    names = [held.name for held in there if isinstance(held.live, nn.Parameter) and not isinstance(held.current(), nn.Parameter)]
    if names or _in_functional_call():
        raise StateError(
            f"other tensors stand in the place of parameters of a compiled model: "
            f"{join_names(names or [held.name for held in swapped], 4)}\n"
            "  why: torch.func.functional_call puts them there for one call, and the program would take them for new values\n"
            "  what to do: model.load_state_dict(values), or an nn.Parameter in each one's place, for values that stay; for values that a "
            "call\n  passes, compile a function that takes them"
        )


def refuse_moved(stored: Iterable[StoredTensor]) -> None:
    """Raises StateError for parameters that were tied, untied, moved or removed: the program has memory for each as it was. In plain torch
    they would be other parameters from then on; here a tensor in a place is a new value of the parameter that belongs there."""
    parameters = [held for held in stored if not held.of and isinstance(held.live, nn.Parameter)]
    owners = {id(held.live): held.name for held in parameters}
    faults = []
    for held in parameters:
        found = {id(now): now for now in (members.get(name) for members, name in held.places)}
        others = [one for one in found if one != id(held.live)]
        faults += [f"{held.name} is {owners[one]} now" for one in others if one in owners]
        if any(found[one] is None for one in others):
            faults.append(f"{held.name} is gone")
        elif len(found) > 1 and (id(held.live) in found or not _equal([*found.values()])):
            faults.append(f"{held.name}, which stands in {len(held.places)} places of the model, is not one parameter any more")
    if faults:
        raise StateError(
            f"parameters were tied, untied, moved or removed after the model was compiled:\n    {lines_of(faults, 4)}\n"
            "  why: the program has memory for each parameter, and updates it, as it stood in the model when that was compiled\n"
            "  what to do: do that before meshc.compile; for other values in the parameters that are there, model.load_state_dict"
        )


def _equal(tensors: Sequence[object]) -> bool:
    """Whether plain tensors of one parameter are equal, as those of a loaded state dict are. DTensors are not compared."""
    plain = [one for one in tensors if isinstance(one, Tensor) and not isinstance(one, DTensor)]
    return len(plain) < len(tensors) or all(one.shape == plain[0].shape and torch.equal(one, plain[0]) for one in plain)


def refuse_set_data(stored: Iterable[StoredTensor]) -> None:
    """Raises StateError after `parameter.data = value` on a DTensor: torch replaces its wrapper, and leaves the values unchanged. Raised
    once: the new values are lost."""
    found = [held for held in stored if held.has_other_wrapper and not held.is_swapped]
    for held in found:
        held.remember()
    if found:
        raise StateError(
            f"data was set of parameters of a compiled model, which has changed nothing: {join_names([held.name for held in found], 4)}\n"
            "  why: they are DTensors, of which torch changes no value by `parameter.data = value`\n"
            "  what to do: with torch.no_grad(): parameter.copy_(value), where value is a DTensor or a number, as parameter * 2 is; or "
            "model.load_state_dict\n  with whole plain tensors, {name: value} and strict=False"
        )


def _in_functional_call() -> bool:
    return any(frame.f_globals.get("__name__") in FUNCTIONAL for frame, _ in traceback.walk_stack(sys._getframe(1)))


def refuse_strangers(model: nn.Module, known: Collection[tuple[int, str]], keys: Collection[str]) -> None:
    """Raises StateError for parameters that came, or moved, with other modules after the model was compiled: no program has them.
    known: places of the model's own, by the identity of a module's dict and the name there; keys: of their ports."""
    names = [
        full
        for path, module in model.named_modules()
        for name, parameter in module._parameters.items()
        for full in [f"{path}.{name}".lstrip(".")]
        if parameter is not None and ((id(module._parameters), name) not in known or key_of("parameter", full) not in keys)
    ]
    if names:
        raise StateError(
            f"these were put into the model after it was compiled: {join_names(names, 4)}\n"
            "  why: the program goes on with the modules that it was compiled from, and these would be passed over\n"
            "  what to do: change the model before meshc.compile; for other values in the modules that are there, load_state_dict"
        )


def compare_ranks(found: Sequence[tuple[Tensor, list[Place]]], world: dist.ProcessGroup | None) -> set[str]:
    """Raises StateError for models that differ between ranks, before any data moves, and for models that ranks compile in different orders.
    Returns the keys of tensors that are on `meta` on rank 0.

    world: a group of all ranks, None if there is one rank
    """
    lines = [f"{' = '.join(key for key, _, _ in places)}: {tensor.dtype} {list(tensor.shape)}" for tensor, places in found]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    unfilled = {key for tensor, places in found if tensor.is_meta for key, _, _ in places}
    if world is None:
        return unfilled
    ranks = world.size()
    said: list[tuple[str, set[str], str]] = [("", set(), "")] * ranks
    dist.all_gather_object(said, (digest, unfilled if dist.get_rank() == 0 else set(), _sample(found)), group=world)
    other = first_other([digest for digest, _, _ in said])
    if other is None:
        before = _FIRST_VALUES.setdefault(world, [])
        before.append([values for _, _, values in said])
        others = [rank for rank in range(ranks) if before[-1][rank] != before[-1][0]]
        if others and environment.log_level() and dist.get_rank() == 0:
            print(f"meshc: first values are rank 0's; those of ranks {join_names([*map(str, others)], 4)} were others", flush=True)
        refuse_crossed(before)
        return said[0][1]
    all_lines: list[list[str]] = [[]] * ranks
    dist.all_gather_object(all_lines, lines, group=world)
    first, second = all_lines[0], all_lines[other]
    shown = [f"    rank 0: {line}" for line in first if line not in second][:5]
    shown += [f"    rank {other}: {line}" for line in second if line not in first][:5]
    raise StateError(
        f"the model on rank {other} is not the one on rank 0:\n"
        + "\n".join(shown or [f"    the same tensors, but in another order: {first[0]} or {second[0]} first"])
        + "\n  what to do: build the same model, from the same configuration, on every rank"
    )


def _sample(found: Sequence[tuple[Tensor, list[Place]]]) -> str:
    """A digest of some values of each tensor, which distinguishes models of equal form."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor, _ in found:
        flat = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // SAMPLED)]
        digest.update(b"" if some.is_meta else some.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def refuse_crossed(rows: Sequence[Sequence[str]]) -> None:
    """Raises StateError if ranks compile models of equal form in different orders: a rank's digests are rank 0's, permuted. Ranks may have
    values of their own, which equal no other rank's. rows: for each compiled model, the last one now, digests by rank."""
    now = len(rows) - 1
    for rank in range(1, len(rows[0])):
        place, seen = now, {now}
        while rows[place][rank] != rows[place][0]:
            place = next((at for at in range(len(rows)) if rows[at][0] == rows[place][rank]), -1)
            if place < 0 or (place in seen and place != now):
                break
            if place == now:
                first = next(at for at in range(len(rows)) if rows[at][rank] == rows[now][0])
                raise StateError(
                    f"ranks 0 and {rank} compile models in another order: what is model {now + 1} on rank 0 was model {first + 1} on rank "
                    f"{rank}, by its first values\n"
                    "  why: the models that ranks compile at one time become one, with rank 0's values; a name in your code would stand\n"
                    "  for one model on one rank and for another on the other\n"
                    "  what to do: compile models in the same order on every rank: out of a list or a dict, not a set"
                )
            seen.add(place)


def mark_empty(x: Tensor) -> None:
    """Fills a tensor with NaN, or the largest integer, which `is_filled` looks for: loaders may write and leave no other trace."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        x.fill_(float("nan"))
    elif x.dtype is not torch.bool:
        x.fill_(torch.iinfo(x.dtype).max)


def is_filled(x: object) -> bool:
    if not isinstance(x, Tensor) or x.is_meta:
        return False
    x = x._local_tensor if isinstance(x, DTensor) else x
    if x.numel() == 0 or x.dtype is torch.bool:
        return True
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return not bool(x.isnan().all())
    return not bool((x == torch.iinfo(x.dtype).max).all())
