"""Conversion of state dicts between whole tensors and DTensors, for loaders and savers that know whole tensors only.

    model.load_state_dict(torch.load("model.bin"))     whole tensors, the same on every rank: each takes its part, nothing is sent
    optimizer.load_state_dict(...)                     likewise, of an optimizer that steps a compiled module's parameters itself
    torch.load("what rank 0 has saved.pt")             parts of tensors: refused on every other rank
    torch.save(model.state_dict()) of a model that     plain tensors, this rank's own memory, on any rank that calls it
    is whole on every rank, and of its optimizer
    accelerator.save_state(...), Trainer._save,        called on every rank, and one writes: whole tensors, in host memory, on each rank
    model.save_pretrained(...) of transformers

Callers that cannot use DTensors are warned:

    torch.distributed.checkpoint, Accelerate, meshc      no warning: they know DTensors
    any caller, where every tensor is replicated         no warning: the state dict has plain tensors
    model.save_pretrained(...) of transformers           no warning: every rank calls it
    any other, as torch.save(model.state_dict()),        a warning, once per model and once per optimizer
    or of optimizer.state_dict()

The caller is read off the stack: the module of the first frame that is neither torch's nn nor another `state_dict`. That is a guess; a
third party's function in between makes the guess wrong, which costs one warning too many or too few.
"""

from __future__ import annotations

import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshc.errors import StateError, lines_of
from meshc.frontend.libraries.stock_trainer import is_marked
from meshc.ir import layouts
from meshc.ir.keys import key_of
from meshc.optimizer.optimizer import parameters_of
from meshc.runtime.agreement.compare import together
from meshc.runtime.failure.failed_rank import current_board
from meshc.runtime.state.random_draws import home_of
from meshc.runtime.state.views import is_whole

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshc.runtime.comm.transfers import Transfers
    from meshc.runtime.state.store import Store
    from meshc.runtime.state.stored_tensor import StoredTensor

ON_ALL_RANKS: Final = (
    ("accelerate.accelerator", "get_state_dict"),
    ("accelerate.checkpointing", "save_accelerator_state"),
    ("accelerate.checkpointing", "load_accelerator_state"),
    ("meshc.runtime.saved.trainer_checkpoint", "save_optimizer_and_scheduler"),
    ("transformers.modeling_utils", "save_pretrained"),
)
"""Functions that every rank calls and one writes for: (module, function)."""
OF_TRAINER: Final = ("transformers.trainer", "_save")
"""Likewise, if the model is marked as split for the Trainer."""
KNOWS: Final = ("torch.distributed.", "accelerate.", "meshc.")
"""Prefixes of the names of modules that know DTensors."""
BETWEEN: Final = ("torch.nn.", "torch.utils._contextlib", "torch._compile", "torch._dynamo.", "contextlib", "functools")
ADVICE: Final = (
    "  what to do: state = program.state_dict(full=True) on every rank, which gives whole tensors on rank 0 (state[\"{part}\"]) and {{}} "
    "elsewhere; or torch.distributed.checkpoint.save({{\"program\": program}}, ...)"
)
OF_LOOPS_OPTIMIZER: Final = (
    "  what to do: get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
    "torch.distributed.checkpoint.state_dict\n  on every rank, which gives whole tensors on rank 0, and set_optimizer_state_dict with "
    "the same options to load them"
)

_WARNED: weakref.WeakSet[nn.Module | torch.optim.Optimizer] = weakref.WeakSet()


def shard_state(store: Store, state: MutableMapping[str, Any], prefix: str) -> None:
    """Before a load into a compiled model: turns whole tensors, and DTensors of another mesh, into DTensors sharded like its parameters.
    Raises StateError where another rank's part would be taken for this one's."""
    rows = _parameters_in(store, state, prefix)
    refuse_parts_of_others((name, value) for name, value, _ in rows)
    for name, value, held in rows:
        if isinstance(held.live, DTensor) and isinstance(value, Tensor) and tuple(value.shape) == held.shape and not value.is_meta:
            state[name] = _dtensor_like(value, held.home, held.live)


def _parameters_in(store: Store, state: Mapping[str, Any], prefix: str) -> list[tuple[str, Any, StoredTensor]]:
    """(name, value, stored parameter) of those entries of a state dict that are parameters of the model."""
    rows = [(name, value, store.find(key_of("parameter", name[len(prefix) :]))) for name, value in state.items() if name.startswith(prefix)]
    return [(name, value, held) for name, value, held in rows if held is not None]


def _dtensor_like(value: Tensor, home: Transfers, like: DTensor, apart: bool = False) -> Tensor:
    """`value` as a DTensor sharded like `like`; a DTensor on that mesh is returned as it is. apart: copied into memory of its own."""
    if isinstance(value, DTensor) and value.device_mesh is like.device_mesh:
        return value
    local = home.chunk_of(value.detach(), like.placements).to(like._local_tensor.device, copy=apart)
    return layouts.dtensor_of(local, like.device_mesh, like.placements, value.shape)


def refuse_parts_of_others(values: Iterable[tuple[str, object]]) -> None:
    """Raises StateError for split DTensors that another rank has saved: a saved mesh has the coordinates of its rank."""
    rank, ranks, faults = dist.get_rank(), dist.get_world_size(), []
    for name, value in values:
        if isinstance(value, DTensor) and not is_whole(value):
            mesh = value.device_mesh
            at, mine = mesh.get_coordinate(), (mesh.mesh == rank).nonzero().tolist()
            of_this = (None if at is None else [*at]) == (mine[0] if mine else None)
            if not of_this or (mesh.mesh.numel() != ranks and home_of(mesh) is None):
                whose = "no rank" if at is None else f"rank {int(mesh.mesh[tuple(at)])}"
                faults.append(f"{name}, {list(value.shape)}: what {whose} had of it on {_text(mesh)}, loaded on rank {rank} of {ranks}")
    if faults:
        raise StateError(
            f"this state has parts of split tensors that are not this rank's:\n    {lines_of(faults, 4)}\n"
            "  why: torch.save of model.state_dict() or optimizer.state_dict() writes of each split tensor what that rank has\n"
            "  what to do: save state = program.state_dict(full=True), which every rank calls and rank 0 writes, or torch.distributed."
            'checkpoint.save({"program": program}, ...);\n  of files that every rank writes for itself, each rank loads its own, on as many'
            " ranks"
        )


def _text(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    return ",".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def is_fully_replicated(values: Iterable[object]) -> bool:
    """Whether all DTensors of a model or an optimizer are replicated, as under DDP, so that callers need no DTensors."""
    return all(is_whole(one) and one._local_tensor.shape == one.shape for one in values if isinstance(one, DTensor))


def as_plain(store: Store, state: MutableMapping[str, Any], prefix: str) -> None:
    """Replaces DTensors in the state dict of a replicated model by their local tensors; sends nothing."""
    for name, value, held in _parameters_in(store, state, prefix):
        if isinstance(value, DTensor) and value is not held.live:  # with `keep_vars` it stays what it is
            state[name] = value._local_tensor.detach()


def optimizer_as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer with local tensors instead of DTensors, likewise."""
    return _replace_in_slots(state, lambda value: value._local_tensor.detach())


def _replace_in_slots(state: dict[str, Any], plain: Callable[[DTensor], Tensor]) -> dict[str, Any]:
    slots = {
        index: {name: plain(value) if isinstance(value, DTensor) else value for name, value in one.items()}
        for index, one in state["state"].items()
    }
    return {**state, "state": slots}


def gather_state(store: Store, model: nn.Module, state: MutableMapping[str, Any], prefix: str) -> None:
    """For callers that run on every rank: replaces DTensors in a compiled model's state dict by whole tensors on the host."""
    if not is_asked_on_all_ranks(model):
        return
    with together(current_board(), "state_dict"), torch.no_grad():
        for name, value, held in _parameters_in(store, state, prefix):
            if isinstance(value, DTensor):
                state[name] = held.whole().cpu()


def is_asked_on_all_ranks(model: nn.Module | None = None) -> bool:
    """Whether the present `state_dict` call is one that every rank makes, by the functions on the stack."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        caller = frame.f_globals.get("__name__"), frame.f_code.co_name
        if caller in ON_ALL_RANKS:
            return True
        if caller == OF_TRAINER:
            return model is not None and is_marked(model)
    return False


def refuse_parts_in(optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, object]]) -> None:
    """`refuse_parts_of_others` of an optimizer's state, by parameter or by its number."""
    names = {id(p): index for index, p in enumerate(parameters_of([optimizer]))}
    refuse_parts_of_others(
        (f"{slot} of parameter {key if isinstance(key, int) else names.get(id(key), '?')}", value)
        for key, slots in state.items()
        for slot, value in slots.items()
    )


def shard_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Turns whole state of DTensor parameters, and state of another mesh, into DTensors sharded like the parameter."""
    refuse_parts_in(optimizer, optimizer.state)
    for parameter in parameters_of([optimizer]):
        if isinstance(parameter, DTensor) and (home := home_of(parameter.device_mesh)) is not None:
            slots = optimizer.state.get(parameter, {})
            for name, value in slots.items():
                if isinstance(value, Tensor) and not value.is_meta and value.dim() and value.shape == parameter.shape:
                    slots[name] = _dtensor_like(value, home, parameter, apart=True)


def gather_optimizer_state(store: Store, state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer, with whole tensors for callers that run on every rank."""
    if not is_asked_on_all_ranks():
        return state
    with together(current_board(), "state_dict"), torch.no_grad():
        return _replace_in_slots(state, lambda value: store.transfers.full(value).cpu())


def takes_dtensors() -> bool:
    """Whether the caller of a hook wants the DTensors themselves: torch.distributed.checkpoint, and meshc's own code."""
    caller = _caller(sys._getframe(2))
    return isinstance(caller, str) and not caller.startswith("accelerate.")


def classify_caller(model: nn.Module, whole: bool) -> str:
    """Kind of the caller of a compiled model's `state_dict`, seen from a hook: "program" for meshc's own code, "all" for callers that run
    on every rank, "" for any other, which is warned unless `whole`: every rank has all of each tensor."""
    caller = _caller(sys._getframe(2))  # the frame above the hook that calls this
    if is_asked_on_all_ranks(model):
        return "all"
    if isinstance(caller, str):
        return "program" if caller.startswith("meshc.") else "all"
    if caller is None:
        return ""
    if not whole:
        _warn(model, caller, "since the model is compiled", "model", ADVICE.format(part="model"))
    return ""


def warn_optimizer_caller(optimizer: torch.optim.Optimizer, stepped_by_program: bool) -> None:
    """Warns the caller of an optimizer's `state_dict` likewise."""
    caller = _caller(sys._getframe(2))
    if not isinstance(caller, FrameType) or is_asked_on_all_ranks():
        return
    if not is_fully_replicated(value for slots in optimizer.state.values() for value in slots.values()):
        advice = ADVICE.format(part="optim") if stepped_by_program else OF_LOOPS_OPTIMIZER
        _warn(optimizer, caller, "since its parameters are those of a compiled model", "optimizer", advice)


def _warn(owner: nn.Module | torch.optim.Optimizer, caller: FrameType, why: str, kind: str, advice: str) -> None:
    if owner not in _WARNED:
        _WARNED.add(owner)
        message = (
            f"the state dict of this {type(owner).__qualname__} holds DTensors, {why}: what torch.save writes of it on a rank is that "
            f"rank's part of each split tensor, and no {kind} that is not on this mesh can load it\n{advice}"
        )
        warnings.warn_explicit(message, UserWarning, caller.f_code.co_filename, caller.f_lineno)


def _caller(frame: FrameType) -> FrameType | str | None:
    """The innermost frame outside BETWEEN and other `state_dict`s; for a module of KNOWS its name instead. None without any."""
    for each, _ in traceback.walk_stack(frame):
        name = str(each.f_globals.get("__name__", ""))
        if f"{name}.".startswith(KNOWS):
            return f"{name}."
        if not name.startswith(BETWEEN) and each.f_code.co_name != "state_dict":
            return each
    return None
