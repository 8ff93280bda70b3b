"""Stored tensor: the program's buffer, and the DTensor that the user sees of the same values; its allocation; whether it is as it was.

    shared      the DTensor's local tensor is the program's buffer, or a view of all but its padding
    otherwise   a copy in torch's layout
    offloaded      both on the rank's host, in memory or in a file
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshc.errors import StateError
from meshc.ir import layouts
from meshc.ir.keys import name_of
from meshc.ir.sharding import Sharding
from meshc.ir.storage_moves import Storage
from meshc.optimizer.optimizer import HIDDEN, Slot
from meshc.runtime.comm.disk import COPIES
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.comm.transfers import Transfers

EDITS: Final[Counter[int]] = Counter()
"""Number of edits that leave no trace in a tensor's version, such as `parameter.data[3] = 0`, by memory address."""
_RECORDED: Final = [0]
"""How often a stored tensor has recorded its memory and wrapper: lists of these are built again when it has grown."""


def inverse(slots: Sequence[int]) -> list[int]:
    """The expert in each slot; slots: the slot of each expert."""
    return sorted(range(len(slots)), key=slots.__getitem__)


def memory_of(value: Tensor) -> int:
    """Address of a tensor's memory on this rank."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.untyped_storage().data_ptr()


def memories_of(values: Iterable[Tensor]) -> list[int]:
    """`memory_of` of tensors that are no DTensors."""
    return list(map(torch.UntypedStorage.data_ptr, map(Tensor.untyped_storage, values)))


def versions_of(tensors: Collection[Tensor]) -> list[int]:
    if not tensors:
        return []
    with torch._C.DisableTorchFunctionSubclass():  # attributes of a DTensor are read in a third of the time
        return list(map(_version, tensors))


def copy_if_shared(value: Tensor, taken: set[int]) -> Tensor:
    """The value in memory of its own, which is `taken` from then on: what is changed in place must change nothing else."""
    value = value.clone() if memory_of(value) in taken else value
    taken.add(memory_of(value))
    return value


@dataclass(eq=False)
class StoredTensor:
    """One stored tensor.

    live     the tensor that the user sees;  local  its memory on this rank: a view of `buffer` if `shared`
    places   the module dicts that hold it, with its name in each
    of, slot, fresh, optimizer  of optimizer state: key of its parameter, name of the slot, initial value, owner
    stale    the program has written the buffer, and `live` is older;  lags  so it is on ranks of other stages, after each run
    storage  where `buffer` is: on the device, the rank's host, or a file there
    slots    of experts that have been moved, the row of each in `buffer`; None: row i is expert i
    seen     the version that was read last;  memory  the DTensor's own local tensor;  wrapper  the storage of the DTensor itself
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: Sharding
    buffer: Tensor
    live: Tensor
    local: Tensor
    placements: tuple[Placement, ...]
    shared: bool
    home: Transfers
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    of: str = ""
    slot: str = ""
    fresh: Slot | None = None
    optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    stale: bool = False
    lags: bool = False
    storage: Storage = "device"
    slots: list[int] | None = None
    seen: tuple[int, int] = (0, 0)
    memory: Tensor | None = None
    wrapper: torch.UntypedStorage | None = None

    def __post_init__(self) -> None:
        self.remember()

    def remember(self) -> None:
        """Records the memory and the wrapper of the live DTensor, by which later replacements are found."""
        self.memory = self.live._local_tensor if isinstance(self.live, DTensor) else None
        self.wrapper = self.live.untyped_storage() if isinstance(self.live, DTensor) else None
        _RECORDED[0] += 1

    def owner(self) -> torch.optim.Optimizer | None:
        """The optimizer that holds the live tensor; None if it is gone, and for what is in the store alone."""
        return None if self.optimizer is None or self.slot.startswith(HIDDEN) else self.optimizer()

    def current(self) -> object:
        """The present entry in the live tensor's place in the model; for optimizer state the live tensor."""
        for members, name in self.places:
            now = members.get(name)
            if now is not self.live:
                return now
        return self.live

    @property
    def is_swapped(self) -> bool:
        """Whether the local tensor of the live DTensor was replaced, as by `module.half()`."""
        return isinstance(self.live, DTensor) and self.live._local_tensor is not self.memory

    @property
    def has_other_wrapper(self) -> bool:
        """Whether the wrapper of the live DTensor was replaced, as by `parameter.data = value`."""
        return self.wrapper is not None and self.live.untyped_storage() is not self.wrapper

    def version(self) -> tuple[int, int]:
        """Versions that change with every write through the DTensor, or through the tensor of its `to_local()`."""
        if not isinstance(self.live, DTensor):
            return self.live._version, 0
        local = self.live._local_tensor
        return self.live._version, local._version + (0 if self.shared else EDITS[local.data_ptr()])

    def whole(self) -> Tensor:
        """The program's values, whole on every rank, with experts in the model's order."""
        full = self.home.whole(self.buffer, self.sharding)
        return full if self.slots is None else full[self.slots]

    def as_chunk(self) -> Tensor:
        """The program's values as the local tensor of the live DTensor."""
        return self.home.to_chunk(self.as_model(self.buffer, self.sharding), self.sharding)

    def as_tile(self, chunk: Tensor) -> Tensor:
        """The program's tile of a local tensor of the live DTensor."""
        return self.in_slots(self.home.to_tile(chunk, self.sharding))

    def as_model(self, tile: Tensor, sharding: Sharding) -> Tensor:
        """A tile of this tensor, or of its gradient, with experts in the model's order."""
        return tile if self.slots is None else self.home.permute_rows(tile, sharding, self.slots)

    def in_slots(self, tile: Tensor) -> Tensor:
        """A tile with experts in the model's order, permuted to their slots."""
        return tile if self.slots is None else self.home.permute_rows(tile, self.sharding, inverse(self.slots))

    def show(self, local: Tensor) -> None:
        """Gives the live DTensor this local tensor."""
        assert isinstance(self.live, DTensor)
        self.local = self.live._local_tensor = local
        self.remember()
        self.seen = self.version()

    def release_copy(self) -> None:
        """Frees the copy that the user sees of moved experts; it has memory only from `sync` to the next step. Until `sync` it is NaN (or
        0), and cannot be written."""
        if self.slots is not None and not self.shared:
            nothing = torch.full((), float("nan") if self.dtype.is_floating_point else 0, dtype=self.dtype, device=self.local.device)
            self.show(nothing.expand(self.local.shape))

    def check_untouched(self) -> None:
        """Raises StateError if the user's copy was written while it was out of date."""
        if self.version() != self.seen:
            raise StateError(
                f"{self.name} was changed in place while it was older than the program's own values, so one of the two would be lost\n"
                f"  why: its storage {self.sharding} is no layout of torch's, so what you see is a copy, brought up to date on demand\n"
                "  what to do: call program.sync() before you change parameters or optimizer state between steps"
            )


def allocate_stored_tensor(
    key: str, sharding: Sharding, shape: tuple[int, ...], dtype: torch.dtype, tile: Tensor | None, home: Transfers, device: torch.device, *,
    distributed: bool, storage: Storage,
) -> StoredTensor:  # fmt: skip
    """A stored tensor of this rank's `tile`, of zeros without one. The other parameters are those of `Store.hold`."""
    elsewhere = distributed and isinstance(home, StageTransfers) and not home.member
    if tile is None:
        tile = torch.zeros((0,) if elsewhere else layouts.local_shape(sharding, home.sizes), dtype=dtype, device=device)
    copy = COPIES.get(storage)
    if copy is not None:
        tile = copy(tile, name_of(key), device)
    live = local = tile
    placements: tuple[Placement, ...] = ()
    shares = not distributed or layouts.shares_memory(sharding, home.mesh)
    if distributed:
        placements, local = layouts.torch_placements(sharding, home.mesh), home.to_chunk(tile, sharding)
        if not shares:
            local = local.clone(memory_format=torch.contiguous_format) if copy is None else copy(local, name_of(key), device)
        live = _wrap_dtensor(local, shape, placements, home, device)
    held = StoredTensor(key, name_of(key), shape, dtype, sharding, tile, live, local, placements, shares or elsewhere, home)
    held.storage = storage
    held.lags = not distributed and isinstance(home, StageTransfers)
    return held


def _wrap_dtensor(
    local: Tensor, shape: tuple[int, ...], placements: tuple[Placement, ...], home: Transfers, device: torch.device
) -> DTensor:
    """The DTensor whose local tensor is `local`."""
    offloaded = local.device.type != device.type
    under = local.to("meta") if offloaded else local  # torch would move it to the mesh's device
    seen = layouts.dtensor_of(under, home.mesh.device_mesh, placements, shape)
    return DTensor(local, seen._spec, requires_grad=False) if offloaded else seen


class UserTensors:
    """Tensors that stay from call to call, and that a user may write to directly or through the DTensor that has their memory: their
    version counters. Torch keeps none of inference tensors."""

    def __init__(self, buffers: Mapping[str, Tensor], stored: Mapping[str, StoredTensor]) -> None:
        """buffers: the tensors by key; stored: those of them that are stored."""
        buffers = {key: value for key, value in buffers.items() if not value.is_inference()}
        held = {key: one.live for key, one in stored.items() if one.shared}
        parts = {key: live for key, live in held.items() if isinstance(live, DTensor)}
        self.keys = [*buffers, *held, *parts]
        self._tensors, self._distributed = [*buffers.values(), *held.values()], list(parts.values())

    def versions(self, others: Iterable[Tensor] = ()) -> list[int]:
        """Their versions by `keys`, and behind these the versions of others."""
        return versions_of([*self._tensors, *map(_local, self._distributed), *others])


_kind, _local, _version = attrgetter("dtype", "device.type"), attrgetter("_local_tensor"), attrgetter("_version")


class _Places:
    """Identity check that tensors are where they were put: each in its dict under its name, with its own memory."""

    def __init__(self, rows: Iterable[tuple[dict[Any, Any], str, Tensor]], held: Iterable[StoredTensor]) -> None:
        """rows: of each place its dict, its name there, and the tensor."""
        rows = list(rows)
        self._members, self._names = [row[0] for row in rows], [row[1] for row in rows]
        self._stand: list[Tensor] = [row[2] for row in rows]
        self._held = [one for one in held if isinstance(one.live, DTensor)]
        self.distributed = [one.live for one in self._held]
        self._recorded = -1

    def hold(self) -> bool:
        if self._recorded != _RECORDED[0]:
            self._recorded = _RECORDED[0]
            self._memories, self.wrappers = [one.memory for one in self._held], [one.wrapper for one in self._held]
        return all(map(is_, map(dict.get, self._members, self._names), self._stand)) and all(
            map(is_, map(_local, self.distributed), self._memories)
        )


class LiveTensorCheck:
    """Identity check, at each call, that a model's parameters and buffers are in their places, unchanged: each live tensor of its dtype, on
    its device, with its own memory and wrapper. If not, `adoption` finds what has changed, and whether that is allowed. It is of tensors
    stored now, without optimizer state."""

    def __init__(self, held: Iterable[StoredTensor]) -> None:
        mine = [one for one in held if not one.of]
        self._places = _Places(((members, name, one.live) for one in mine for members, name in one.places), mine)
        plain = [one for one in mine if not isinstance(one.live, DTensor)]  # of a DTensor they follow from its memory and wrapper
        self._plain = [one.live for one in plain]
        self._kinds: list[tuple[torch.dtype, str]] = [(one.dtype, one.buffer.device.type) for one in plain]

    def is_unchanged(self) -> bool:
        places = self._places
        with torch._C.DisableTorchFunctionSubclass():
            return (
                places.hold()
                and list(map(_kind, self._plain)) == self._kinds
                and all(map(is_, map(Tensor.untyped_storage, places.distributed), places.wrappers))
            )


class LiveStateCheck:
    """Identity check, at each call, that optimizers hold their state where it was put: the entry of each parameter, each tensor in it, with
    its own memory. If not, the store looks at each. It is of state stored now, and of optimizers alive now."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        mine = [one for one in stored.values() if one.of]
        owners: dict[int, torch.optim.Optimizer] = {}
        rows: list[tuple[dict[str, Any], str, Tensor]] = []
        for one in mine:
            if (optimizer := one.owner()) is not None:
                entry = optimizer.state.get(stored[one.of].live)
                owners[id(optimizer)] = optimizer
                rows.append((entry if isinstance(entry, dict) else {}, one.slot, one.live))
        # a tensor's hash is a function of Python: entries are compared in their order, not looked up
        self._entries = [(weakref.ref(one), list(one.state), list(one.state.values())) for one in owners.values()]
        self._places = _Places(rows, mine)

    def is_unchanged(self) -> bool:
        for reference, parameters, entries in self._entries:
            optimizer = reference()
            if optimizer is None or len(optimizer.state) != len(entries):
                return False
            if not (all(map(is_, optimizer.state, parameters)) and all(map(is_, optimizer.state.values(), entries))):
                return False
        return self._places.hold()
