"""Expert rebalancing between ranks: permutes rows of parameters and optimizer state, and updates the buffer of expert slots.

    meshc_slots  [0 1 2 3]  ->  [0 2 1 3]         experts 1 and 2 swap slots, and so ranks, if each rank has two slots
    gate_up_proj, its exp_avg, its exp_avg_sq ..  rows 1 and 2 are sent; nothing else moves

    meshc_copies [[-1] [-1]]  ->  [[-1] [0]]      the second rank has a copy of the expert in slot 0; nothing is sent for it

The user's DTensors keep experts in the model's order. Once experts have moved these are copies, as of any storage that torch's placements
cannot describe, and have memory of their own only from `sync` to the next step (`StoredTensor.release_copy`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshc.cost.expert_balance import ExpertPlacement
from meshc.errors import StateError
from meshc.frontend.expert_placement import COPIES, SLOTS, copies_per_rank, expert_slots_of, slots_of, weights_of
from meshc.ir import layouts
from meshc.ir.keys import key_of
from meshc.runtime.comm import collectives, reorder
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.state import ownership
from meshc.runtime.state.stored_tensor import StoredTensor, inverse

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store


def current_spread(store: Store, path: str, groups: int) -> ExpertPlacement:
    """Slots and copies of the experts at a module's path, which are split among `groups` groups of ranks."""
    slots = [int(slot) for slot in store.buffer(key_of("buffer", f"{path}.{SLOTS}".lstrip("."))).tolist()]
    if not copies_per_rank(store.model.get_submodule(path)):
        return ExpertPlacement(tuple(slots))
    copies = store.buffer(key_of("buffer", f"{path}.{COPIES}".lstrip(".")))[:groups].flatten()
    return ExpertPlacement(tuple(slots), tuple(int(slot) for slot in copies.tolist()))


def rows_of(store: Store, path: str) -> list[StoredTensor]:
    """Stored tensors with a row per expert at this path: parameters and their state. Raises StateError for state that mixes experts."""
    module = store.model.get_submodule(path)
    found: list[StoredTensor] = []
    for name in weights_of(module):
        parameter = store.find(key_of("parameter", f"{path}.{name}".lstrip(".")))
        assert parameter is not None, "a store has all parameters of its model"
        states = [held for held in store.held.values() if held.of == parameter.key]
        mixed = [held for held in states if not _has_expert_rows(held, parameter) and held.shape[:1] not in ((), (1,))]
        if mixed:
            raise StateError(
                f"{mixed[0].name} is of shape {list(mixed[0].shape)}, and experts of {path} cannot be moved with state that has no row for "
                f"each of the {parameter.shape[0]}\n  what to do: another optimizer for the experts, or leave them where they are"
            )
        found += [parameter, *(held for held in states if _has_expert_rows(held, parameter))]
    return found


def received_bytes_of_move(store: Store, path: str, wanted: Sequence[int]) -> int:
    """Bytes that the rank with the most is sent, if the experts at this path move to the slots `wanted`."""
    source = _source(current_spread(store, path, 1).slots, wanted)
    return sum(reorder.received_bytes(held.sharding, held.home.mesh, source, held.dtype.itemsize) for held in rows_of(store, path))


def first_differing_rank(store: Store, said: str) -> int | None:
    """The first rank whose `said` differs from that of rank 0; None if all are equal. All ranks call this."""
    world = store.transfers.groups.world
    digest = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big", signed=True)
    digests = collectives.all_gather(torch.tensor([digest], dtype=torch.int64, device=store.device), world).wait().tolist()
    return next((rank for rank, value in enumerate(digests) if value != digests[0]), None)


def move(store: Store, path: str, wanted: ExpertPlacement) -> None:
    """Moves expert i at this path to slot wanted.slots[i], and sets its copies to wanted.copies. All ranks call this, in the same order,
    between two calls."""
    module = store.model.get_submodule(path)
    source, held_ones = _source(current_spread(store, path, 1).slots, wanted.slots), rows_of(store, path)
    with torch.no_grad():
        for held in held_ones if source != sorted(source) else ():
            held.buffer.copy_(held.home.permute_rows(held.buffer, held.sharding, source))
            _record_slots(held, wanted.slots)
        where = expert_slots_of(module)
        assert where is not None
        where.slots.copy_(torch.tensor(wanted.slots, dtype=torch.int64))
        if where.copies is not None:
            where.copies.flatten()[: len(wanted.copies)] = torch.tensor(wanted.copies, dtype=torch.int64)
    ownership.own_copies(module, store)
    store.moves += 1


def reorder_new_state(parameter: StoredTensor, state: StoredTensor) -> None:
    """Permutes new state, which is in the model's order, like its parameter, if the experts of that have been moved."""
    if parameter.slots is not None and _has_expert_rows(state, parameter):
        with torch.no_grad():
            state.buffer.copy_(state.home.permute_rows(state.buffer, state.sharding, inverse(parameter.slots)))
        _record_slots(state, parameter.slots)


def _has_expert_rows(state: StoredTensor, parameter: StoredTensor) -> bool:
    return state.shape[:1] == parameter.shape[:1]


def _source(now: Sequence[int], wanted: Sequence[int]) -> list[int]:
    """For each slot of `wanted` the present slot of its expert."""
    return [now[expert] for expert in inverse(wanted)]


def _record_slots(held: StoredTensor, slots: Sequence[int]) -> None:
    """Records that rows have moved: the live tensor shares the buffer only if that is in the model's order again."""
    held.slots = None if list(slots) == sorted(slots) else list(slots)
    if isinstance(held.home, StageTransfers) and not held.home.member:
        return  # nothing of the tensor is stored here
    held.shared = held.slots is None and layouts.shares_memory(held.sharding, held.home.mesh)
    held.stale = held.slots is not None
    if held.slots is not None:
        held.release_copy()
    else:
        chunk = held.as_chunk()
        held.show(chunk if held.shared else chunk.to(held.local.device, copy=True))


def experts_of(model: nn.Module) -> list[str]:
    """Paths of the modules whose experts may be moved."""
    return [path for path, module in model.named_modules() if slots_of(module) is not None]
