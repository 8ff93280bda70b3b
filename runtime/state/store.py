"""Store of all tensors that live between steps: parameters, buffers, optimizer state. One per model, shared by its programs.

    module.weight                       DTensor ──local──> ┌────────┐
                                                           │ memory │ <── the program's buffer: store.buffer("parameter:weight")
    optimizer.state[weight]["exp_avg"]  likewise           └────────┘

Where torch's placements describe the storage, the DTensor's local tensor is the program's buffer, or a view of all but its padding.
Elsewhere (uneven over two axes, fused heads) the DTensor is a copy with torch's placements. The buffer is the truth: `mark_written` records
that a program has updated it, `sync` refreshes the copies, and `adopt_changes`, before a program runs, reads back changes from outside. It
compares identity and `_version`, which tensors of a state dict share. Writes through `parameter.data` change neither, which matters for
copies only.

Every method that may move data is called on all ranks, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshc.errors import StateError, join_names
from meshc.frontend.gradient_hooks import share_hooks
from meshc.frontend.module_watch import ModuleState
from meshc.ir import layouts
from meshc.ir.keys import Kind, is_a
from meshc.ir.mesh import Mesh, axis_sizes
from meshc.ir.sharding import Sharding
from meshc.ir.storage_moves import Storage
from meshc.optimizer.optimizer import AnyOptimizer, OptimizerSpec, members_of
from meshc.optimizer.spec import CODES, GRADIENT
from meshc.program.program import Port
from meshc.runtime.comm.groups import Groups
from meshc.runtime.comm.stage_transfers import StageTransfers, of_stages
from meshc.runtime.comm.transfers import Transfers
from meshc.runtime.failure.failed_rank import single_thread_context
from meshc.runtime.state import adoption, exchanges, optimizer_state, ownership, random_draws, reads, state_dicts, views
from meshc.runtime.state.changes import Changes
from meshc.runtime.state.stored_tensor import LiveStateCheck, LiveTensorCheck, StoredTensor, allocate_stored_tensor


class Store:
    """Built by `Store.adopt`; `Store.of(model)` returns it again.

    `seed` and `step` are those of the random numbers; they are kept here because checkpoints have them. `filling`: the model
    has other tensors for the time of `init_weights`. `moves`: how often experts have been moved.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, groups: Groups | None = None) -> None:
        if mesh.device_mesh is None:
            raise StateError(f"the mesh {mesh} was made without a process group, so nothing can live on it: compile for a DeviceMesh")
        rank = dist.get_rank()
        groups = groups or Groups(axis_sizes(mesh), rank, dist.get_world_size(), mesh.device_mesh)
        self.mesh, self.device = mesh, device
        self.seed = self.step = self.moves = 0
        self.scaler: torch.amp.GradScaler | None = None
        self.filling = False
        self.transfers = Transfers(mesh, groups, rank, device)
        random_draws.follow(self.transfers)
        for each in (views, exchanges, reads):
            each.follow()
        self.owners: dict[str, int] = {}
        self._stages: Mapping[int, StageTransfers] = {}
        self.held: dict[str, StoredTensor] = {}
        self._alias: dict[str, str] = {}
        self._unfilled: set[str] = set()
        self._born_unfilled: set[str] = set()
        self._live: dict[int, str] = {}
        self._places: set[tuple[int, str]] = set()
        self._replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._model = weakref.ref(model)
        self._optimizers: tuple[weakref.ref[torch.optim.Optimizer], ...] = ()
        self._stood: LiveTensorCheck | None = None
        self._state_stood: LiveStateCheck | None = None
        self._followed: list[StoredTensor] | None = None
        self.changes = Changes(self)
        self._without_strangers: Callable[[], ModuleState | None] = _gone_reference

    @staticmethod
    def of(owner: nn.Module | torch.optim.Optimizer) -> Store | None:
        """The store of a compiled model, or of an optimizer that a program updates."""
        return ownership.store_of(owner)

    @classmethod
    def adopt(
        cls,
        model: nn.Module,
        ports: Iterable[Port],
        mesh: Mesh,
        device: torch.device | str,
        groups: Groups | None = None,
        owners: Mapping[str, int] | None = None,
    ) -> Store:
        """Replaces the model's parameters by DTensors, stored as the ports of kind parameter say, and makes its buffers equal on all ranks.

        Initial values are rank 0's; tensors on `meta` there become empty storage, listed in `unfilled`. Parameters without a port are
        stored whole. A model that has a store keeps it: ports of further programs must require the same storage. `owners` are the
        coordinates on the pipeline axis of parameters that live on one stage. Raises StateError, on all ranks, if the model differs
        between ranks.
        """
        ports = [port for port in ports if port.kind in ("parameter", "buffer")]
        store = cls.of(model)
        if store is None:
            store = cls(model, mesh, torch.device(device), groups)
            store.set_owners(owners or {})
            store._adopt_model(model, ports)
        elif mesh != store.mesh:
            raise StateError(f"the model's parameters live on the mesh {store.mesh}: a second program of it cannot be for {mesh}")
        else:
            adoption.check_storage(store, ports)
            store.set_owners(owners or {})
        return store

    def adopt_optimizer(self, optimizer: AnyOptimizer, ports: Iterable[Port], spec: OptimizerSpec | None = None) -> None:
        """`optimizer_state.adopt` for this store."""
        optimizer_state.adopt(self, optimizer, [port for port in ports if port.kind == "state"], spec)
        known = {id(one) for one in self.optimizers}
        new = tuple(weakref.ref(member) for member in members_of(optimizer) if id(member) not in known)
        self._optimizers = (*(reference for reference in self._optimizers if reference() is not None), *new)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise StateError("the model of this store is gone: keep it as long as its programs")
        return model

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that programs of the model step, as far as they are alive."""
        return tuple(one for reference in self._optimizers if (one := reference()) is not None)

    # Used by programs.

    def set_owners(self, owners: Mapping[str, int]) -> None:
        """Sets the pipeline stage of tensors, by key, before they are stored."""
        axis = self.mesh.pipeline_axis
        self.owners |= owners
        if owners and axis is not None and not self._stages:
            self._stages = of_stages(self.transfers, axis.name)
            for home in self._stages.values():
                random_draws.follow(home)

    def places(self) -> dict[str, int]:
        """The pipeline stage of each tensor that lives on one, by every key of a tied one."""
        return {**{name: self.owners[key] for name, key in self._alias.items() if key in self.owners}, **self.owners}

    def home(self, key: str) -> Transfers:
        """The transfers of a stored tensor: those of its pipeline stage, or of all ranks."""
        return self._stages[self.owners[key]] if key in self.owners else self.transfers

    def find(self, key: str) -> StoredTensor | None:
        """The stored tensor of a port's key (`port.key`), or of any key of a tied parameter; None if there is none."""
        return self.held.get(self._alias.get(key, key))

    def live_of(self, key: str) -> Tensor:
        """The model's live tensor of a parameter, by its port's key."""
        return self.held[self._alias.get(key, key)].live

    def buffer(self, key: str) -> Tensor:
        """The program's own tensor of a port, of its padded local shape; always the same tensor, updated in place."""
        held = self.find(key)
        if held is None:
            raise StateError(f"{key} is not stored: the model has no such parameter, buffer or optimizer state")
        return held.buffer

    def mark_written(self, keys: Container[str] | None = None) -> None:
        """Records that a program has written these buffers (all, by default), by the keys of `held`: copies of them are out of date."""
        for held in self._copies:
            if keys is None or held.key in keys:
                held.stale = True
                held.release_copy()
        self.changes.record()

    def sync(self) -> None:
        """Brings the live tensors up to date."""
        if not any(held.stale for held in self.held.values()):
            return
        self.changes.look()
        with single_thread_context("sync"), torch.no_grad():
            for held in self.held.values():
                if held.stale and held.lags:
                    assert isinstance(held.home, StageTransfers)
                    held.home.to_all(held.buffer)
                    held.stale = False
                elif held.stale:
                    held.check_untouched()
                    self._refresh(held)
        self.changes.record()

    def adopt_changes(self, stands: bool = False) -> None:
        """Before a program runs: reads back changes from outside since the last call. stands: the model was found unchanged."""
        stands = stands or self._standing.is_unchanged()
        if not stands:
            self._refuse_rearranged()
        found = []
        for held in self._copies if stands and self._state_stands() else self.held.values():
            current = self._current(held)
            replaced = current is not held.live or held.is_swapped
            if replaced or (not held.shared and held.version() != held.seen):
                found.append((held, current, replaced))
        self.changes.look([held for held, _, replaced in found if replaced])
        drawn = random_draws.has_draws()
        self.changes.tell(sends=drawn or bool(found))
        if not found and not drawn:
            return
        with torch.no_grad(), self._track_taken() as taken:
            random_draws.even_out(self.held.values())
            for held, current, _ in found:
                if held.is_swapped:
                    self._reclaim(held)
                if current is not held.live:
                    self._take(held, current)
                    taken.append(held)
                elif not held.shared and held.version() != held.seen:
                    if held.stale:
                        held.check_untouched()
                    self._read_back(held)
            self.changes.record()

    def read_back(self, *kinds: Kind) -> None:
        """After a load: takes replaced tensors and in-place writes, whether torch has counted them or not."""
        copies = [held for key, held in self.held.items() if is_a(key, *kinds) and not held.shared]
        self.changes.look(copies)
        self.changes.tell(sends=bool(copies))
        with torch.no_grad(), self._track_taken() as taken:
            for key, held in self.held.items():
                if is_a(key, *kinds):
                    current = self._current(held)
                    if current is not held.live:
                        self._take(held, current)
                        taken.append(held)
                    else:
                        self._read_back(held)

    @property
    def unfilled_names(self) -> list[str]:
        """Names of parameters and buffers that came from `meta` and have no values yet on this rank."""
        self._unfilled = {key for key in self._unfilled if not adoption.is_filled(self._current(self.held[key]))}
        return sorted(self.held[key].name for key in self._unfilled)

    def refuse_unfilled(self) -> None:
        """Raises StateError if anything has no values yet; sends nothing."""
        names = self.unfilled_names if self._unfilled else []
        if names:
            raise StateError(
                f"the model was built on `meta`, and these have no values yet: {join_names(names, 6)}\n"
                '  what to do: first program.load_state_dict(state), dcp.load({"program": program}, ...) or program.init_weights(fn);\n'
                "  buffers that no checkpoint holds (persistent=False) need init_weights or an assignment; a module that only "
                "torch.func.functional_call reads, with values for all of it, is to be none of the model's: self.base = [base]"
            )

    def refuse_changed_model(self, state: ModuleState | None = None) -> bool:
        """Raises StateError if dtype, device or modules of the model have changed since it was compiled; sends nothing. state: the same
        object as long as the model has the same modules and parameters, which are then not searched again. Returns whether all tensors
        are in their places, unchanged."""
        if state is None or self._without_strangers() is not state:
            adoption.refuse_strangers(self.model, self._places, self._alias)
            self._without_strangers = _gone_reference if state is None else weakref.ref(state)
        stands = self._standing.is_unchanged()
        if not stands:
            adoption.refuse_swapped(self.model, self.held.values())
            adoption.refuse_converted(self.held.values())
            self._refuse_rearranged()
        return stands

    def _refuse_rearranged(self) -> None:
        adoption.refuse_moved(self.held.values())
        adoption.refuse_set_data(self.held.values())

    @property
    def _standing(self) -> LiveTensorCheck:
        """The check that live tensors are unchanged, built at first use."""
        if self._stood is None:
            self._stood = LiveTensorCheck(self.held.values())
        return self._stood

    def _state_stands(self) -> bool:
        """Whether optimizers hold their state where it was put. If not, it may stand elsewhere from now on."""
        if self._state_stood is None:
            self._state_stood = LiveStateCheck(self.held)
        stands = self._state_stood.is_unchanged()
        if not stands:
            self._state_stood = None
        return stands

    @property
    def _copies(self) -> list[StoredTensor]:
        """Stored tensors whose live ones have other memory, or are on ranks of other stages too."""
        if self._followed is None:
            self._followed = [held for held in self.held.values() if held.lags or not held.shared]
        return self._followed

    def check_filled(self) -> None:
        """Before a program runs: `refuse_unfilled`, and reads back tensors that came from `meta` and were filled in place."""
        self.refuse_unfilled()
        if not self._born_unfilled:
            return
        with torch.no_grad():
            for key in sorted(self._born_unfilled):
                if self._current(self.held[key]) is self.held[key].live and not self.held[key].stale:
                    self._read_back(self.held[key])
        self._born_unfilled.clear()

    def show_gradients(self) -> None:
        """Sets `.grad` of parameters to the gradients that programs keep. All ranks call this."""
        kept = [held for held in self.held.values() if held.slot == GRADIENT]
        if any(not held.shared or held.lags for held in kept):
            self.sync()
        for held in kept:
            parameter = self.held[held.of].live
            if parameter.grad is not held.live:
                parameter.grad = held.live

    # Checkpoints.

    state_dict, whole_model, load_state_dict = state_dicts.state_dict, state_dicts.whole_model, state_dicts.load_state_dict

    def write(self, held: StoredTensor, value: Tensor) -> None:
        """Gives a stored tensor a value: a DTensor of any sharding, or a plain tensor that is whole and the same on all ranks."""
        if held.fresh is not None and held.fresh.part == CODES and value.is_floating_point():
            value = value.to(held.dtype)  # torch's loader has cast them to the parameter's dtype, in which they are exact
        if tuple(value.shape) != held.shape or value.dtype.is_floating_point != held.dtype.is_floating_point:
            raise StateError(
                f"{held.name} is {held.dtype} of shape {list(held.shape)}; it cannot become {value.dtype} of shape {list(value.shape)}"
            )
        with torch.no_grad():
            chunk = held.home.chunk_of(value.detach(), held.placements)
            if held.slots is not None and not held.shared:
                held.show(torch.empty_like(chunk, dtype=held.dtype, device=held.local.device, memory_format=torch.contiguous_format))
            if chunk.data_ptr() != held.local.data_ptr() or chunk.dtype != held.dtype:
                held.local.copy_(chunk)
            self._read_back(held)
        self._unfilled.discard(held.key)

    def write_tile(self, held: StoredTensor, tile: Tensor) -> None:
        """Gives a stored tensor this rank's padded tile, with experts in the model's order, in any dtype that can be cast. All ranks that
        have a part call this."""
        with torch.no_grad():
            held.buffer.copy_(held.in_slots(tile))
            self._refresh(held)
        self._unfilled.discard(held.key)

    # Adoption.

    def _adopt_model(self, model: nn.Module, ports: Sequence[Port]) -> None:
        found = adoption.tensors_of(model)
        adoption.check_ports(ports, {key: tensor for tensor, places in found for key, _, _ in places})
        unfilled = adoption.compare_ranks(found, self.transfers.groups.world)
        wanted = {port.key: port for port in ports}
        holders_of_copies: set[nn.Module] = set()
        while found:  # from the end, so that each old tensor is freed before the next one is stored
            tensor, places = found.pop()
            key = next((key for key, _, _ in places if key in wanted), places[0][0])
            self._alias |= {other: key for other, _, _ in places}
            if self._stages and _is_parameter(key):
                self.owners.setdefault(key, 0)  # a parameter that this program does not use may be updated by another
            sharding = (wanted[key].sharding if key in wanted else None) or layouts.whole_sharding(tensor.shape)
            whole = self.transfers.full(cast(DTensor, tensor.detach())) if isinstance(tensor, DTensor) else tensor  # a copy's
            tile = None if key in unfilled else self.home(key).scatter(whole, sharding, tensor.dtype)
            there = wanted[key].storage if _is_parameter(key) and key in wanted else "device"
            held = self.hold(key, sharding, tuple(tensor.shape), tensor.dtype, tile, distributed=_is_parameter(key), storage=there)
            if _is_parameter(key):
                held.live = nn.Parameter(held.live, requires_grad=tensor.requires_grad)
                share_hooks(tensor, held.live)
                held.remember()
                held.seen = held.version()
                ownership.mark_replaced(tensor, held.name)
                self._replaced[tensor] = key
                self._live[id(held.live)] = key
            held.places = [(module._parameters if _is_parameter(key) else module._buffers, name) for _, module, name in places]
            for members, name in held.places:
                members[name] = held.live
            if not held.shared:
                holders_of_copies |= {module for _, module, _ in places}
        self.held = dict(reversed(self.held.items()))
        self._places = {(id(members), name) for held in self.held.values() for members, name in held.places}
        self.invalidate_checks()
        ownership.own_model(model, holders_of_copies, self)

    def hold(
        self, key: str, sharding: Sharding, shape: tuple[int, ...], dtype: torch.dtype, tile: Tensor | None, *, distributed: bool,
        storage: Storage = "device",
    ) -> StoredTensor:  # fmt: skip
        """Stores a tensor, with a DTensor over its memory if it is distributed; without a tile it is unfilled."""
        strangers = sharding.split_axes() - set(self.mesh.names)
        if strangers or sharding.partial or not (distributed or not layouts.splitting_axes(sharding, self.mesh)):
            what = "storage is split by axes of the mesh" if distributed else "buffers and 0-dim state are whole on every rank"
            raise StateError(f"{key} cannot be stored as {sharding} on the mesh {self.mesh}: {what}")
        home = self.home(key)
        self.transfers.groups.prepare([home.splitting(sharding)])
        held = allocate_stored_tensor(key, sharding, shape, dtype, tile, home, self.device, distributed=distributed, storage=storage)
        if self._stages:
            self.transfers.groups.prepare([random_draws.replicated_axes(held)])  # random draws are broadcast among the ranks of its stage
        if tile is None:
            adoption.mark_empty(held.local)
            self._unfilled.add(key)
            self._born_unfilled.add(key)
        held.seen = held.version()
        self.held[key] = held
        self.invalidate_checks()
        return held

    def invalidate_checks(self) -> None:
        """After a change of the stored tensors, or of whose memory is theirs: the checks that precede a run are built anew."""
        self._stood = self._state_stood = self._followed = None
        self.changes.renew()

    def live(self, parameter: Tensor) -> Tensor:
        """The live tensor of a parameter of this model, live or replaced; any other tensor is returned as it is."""
        key = self.parameter_key(parameter)
        return parameter if key is None else self.held[key].live

    def parameter_key(self, parameter: Tensor) -> str | None:
        """The key of a parameter of this model, live or replaced. Live ones go by identity: torch's `module.to` refuses what has a weak
        reference."""
        return self._replaced.get(parameter) or self._live.get(id(parameter))

    # Changes from outside.

    def _current(self, held: StoredTensor) -> object:
        """The present entry in the live tensor's place, in the model or in the optimizer's state."""
        if not held.of:
            return held.current()
        optimizer = held.owner()
        return held.live if optimizer is None else optimizer.state.get(self.held[held.of].live, {}).get(held.slot)

    @contextmanager
    def _track_taken(self) -> Iterator[list[StoredTensor]]:
        """A context whose list collects taken tensors; afterwards other forms of optimizer state are removed."""
        taken: list[StoredTensor] = []
        yield taken
        if any(held.of for held in taken):
            optimizer_state.forget_other_forms(self, self.optimizers)

    def _take(self, held: StoredTensor, value: object) -> None:
        """Copies the value in the live tensor's place, and puts the live tensor back."""
        if value is None and held.of:
            value = optimizer_state.replacement_state(self, held)
        if value is not None:
            self.write(held, value if isinstance(value, Tensor) else torch.tensor(value, dtype=held.dtype))
        elif held.of:
            self.reset(held)
        else:
            raise StateError(f"{held.name} is gone from the model; a compiled model keeps its parameters and buffers")
        if isinstance(value, nn.Parameter):
            held.live.requires_grad_(value.requires_grad)
        for members, name in held.places:
            members[name] = held.live
        if held.optimizer is not None and (optimizer := held.optimizer()) is not None:
            optimizer.state[self.held[held.of].live][held.slot] = held.live

    def _reclaim(self, held: StoredTensor) -> None:
        """Takes the values of a local tensor that was swapped into the live DTensor, and restores the own memory of that."""
        assert isinstance(held.live, DTensor) and held.memory is not None
        value = layouts.dtensor_of(held.live._local_tensor, held.home.mesh.device_mesh, held.placements, held.shape)
        held.live._local_tensor = held.memory
        held.remember()
        self.write(held, value)

    def reset(self, held: StoredTensor) -> None:
        """Sets optimizer state to its value before the first step."""
        with torch.no_grad():
            held.buffer.copy_(optimizer_state.initial_state(self, held.sharding, held.shape, held.dtype, self.held[held.of], held.fresh))
            self._refresh(held)

    def forget_states(self) -> None:
        """Removes the state of optimizers that no longer exist."""
        gone = {key for key, held in self.held.items() if held.of and (held.optimizer is None or held.optimizer() is None)}
        self.held = {key: held for key, held in self.held.items() if key not in gone}
        self.invalidate_checks()

    def _refresh(self, held: StoredTensor) -> None:
        if not held.shared and held.slots is not None:
            held.show(held.as_chunk().to(held.local.device, copy=True, memory_format=torch.contiguous_format))
        elif not held.shared:
            held.local.copy_(held.as_chunk())
        held.stale, held.seen = False, held.version()

    def _read_back(self, held: StoredTensor) -> None:
        if not held.shared:
            held.buffer.copy_(held.as_tile(held.local))
        held.stale, held.seen = False, held.version()


def _gone_reference() -> None:
    """A dead weak reference, when called: returns None."""


def _is_parameter(key: str) -> bool:
    return is_a(key, "parameter")

