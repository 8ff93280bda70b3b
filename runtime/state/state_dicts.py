"""State dict of a program in torch's form: saved from, and loaded under, any mesh and plan. (Files: `saved/checkpoint_folder.py`.)

    {"model": {name: DTensor or buffer},                                  as model.state_dict()
     "optim": {"state": {parameter: {slot: DTensor or 0-dim tensor}},     as torch.distributed.checkpoint.state_dict.get_state_dict
               "param_groups": [{"params": [names], "lr": ..., ...}]},
     "meshc": {"version": 1, "seed": ..., "step": ..., "hidden": {...}}}  random numbers, and state that torch's optimizers do not keep;
                                                                          where the loss is scaled "scaler", as `GradScaler.state_dict()`

So files of `get_state_dict` and of a program hold the same things; only "meshc" is missing in the former.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshc.errors import StateError
from meshc.ir.keys import key_of
from meshc.optimizer.optimizer import FIRST, HIDDEN, parameters_of
from meshc.optimizer.spec import NON_FINITE, PART_ERRORS
from meshc.optimizer.state_formats import convert_state
from meshc.runtime.failure.failed_rank import SETTLED_S, current_board, single_thread_context
from meshc.runtime.state.whole_state import refuse_parts_of_others

if TYPE_CHECKING:
    from meshc.runtime.state.store import Store
    from meshc.runtime.state.stored_tensor import StoredTensor

VERSION = 1
_EXTRA = "_extra_state"


Value = TypeVar("Value")


class OptimizerTables(TypedDict):
    """Optimizer state in torch's form: slots by the parameter's name, and the groups, whose "params" are names."""

    state: dict[str, dict[str, object]]
    param_groups: list[dict[str, Any]]


class ProgramState(TypedDict, total=False):
    """State of a program beside the model and the optimizer."""

    version: int
    seed: int
    step: int
    hidden: dict[str, Tensor]
    scaler: dict[str, Any]


class State(TypedDict, total=False):
    """A checkpoint. `model` has also the extra state of modules, which need not be tensors."""

    model: dict[str, Tensor]
    optim: OptimizerTables
    meshc: ProgramState


def state_dict(store: Store, full: bool = False) -> dict[str, Any]:
    """The live tensors, by name; `dcp.load` writes into them in place. With `full`, whole CPU tensors on rank 0 and {} elsewhere.

    Raises PeerError if ranks have stepped with different numbers, and StateError if ranks have changed tensors differently; both are
    checked first, so that no wrong state is returned.
    """
    with single_thread_context("state_dict"):
        _agree(store)
        state: State = {"model": dict(store.model.state_dict())}
        if store.optimizers:
            state["optim"] = _optimizer_state(store, store.optimizers)
        state["meshc"] = {"version": VERSION, "seed": store.seed, "step": store.step}
        hidden = {held.name: held.live for held in store.held.values() if held.slot.startswith(HIDDEN) and held.slot != NON_FINITE}
        if store.scaler is not None:
            state["meshc"]["scaler"] = store.scaler.state_dict()
        if hidden:
            state["meshc"]["hidden"] = hidden
        return dict(_gather_state(store, state) if full else state)


def whole_model(store: Store, wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """The model's tensors (those whose names are `wanted`), whole, on the CPU of rank 0; {} elsewhere."""
    with single_thread_context("state_dict"):
        _agree(store)
        found = {name: value for name, value in store.model.state_dict().items() if wanted is None or wanted(name)}
        return _gather_state(store, {"model": found, "meshc": {}}).get("model", {})


def _agree(store: Store) -> None:
    """Brings the live tensors up to date, once ranks have stepped and changed tensors alike."""
    board = current_board()
    if board is not None:
        board.settle(SETTLED_S)
    store.adopt_changes()
    store.sync()
    store.changes.compare(SETTLED_S)


def load_state_dict(store: Store, state: Mapping[str, Any]) -> None:
    """Loads a state of `state_dict` or `get_state_dict`, or a model's state dict alone: DTensors of any sharding, or whole tensors.

    Plain tensors must be the same on all ranks. "optim" is ignored if no program of the model has an optimizer. Raises
    StateError, before anything is changed, if parameters are missing, unexpected, or of another shape.
    """
    with single_thread_context("load_state_dict"):
        _load(store, state if state.keys() & {"model", "optim", "meshc"} else {"model": state})


def _load(store: Store, state: Mapping[str, Any]) -> None:
    store.adopt_changes()
    optim = state.get("optim") if store.optimizers else None
    states = optim["state"] if optim is not None and "state" in optim else {}
    refuse_parts_of_others(
        [*state.get("model", {}).items(), *((f"{name}/{slot}", value) for name, slots in states.items() for slot, value in slots.items())]
    )
    faults = _model_faults(store, state["model"]) if "model" in state else []
    faults += _optimizer_faults(store, optim) if optim is not None else []
    if faults:
        raise StateError("this state does not fit the model:\n    " + "\n    ".join(faults))
    if "model" in state:
        _load_model(store, state["model"])
    if optim is not None:
        _load_optimizer(store, optim, state.get("meshc", {}).get("hidden", {}))
    if "meshc" in state:
        store.seed, store.step = int(state["meshc"]["seed"]), int(state["meshc"]["step"])
        if store.scaler is not None and "scaler" in state["meshc"]:
            store.scaler.load_state_dict(state["meshc"]["scaler"])
    elif optim is not None:
        store.step = 0
        warnings.warn("the checkpoint was not written by a meshc program: random numbers (dropout) start again at step 0", stacklevel=3)


def _optimizer_state(store: Store, optimizers: Sequence[torch.optim.Optimizer]) -> OptimizerTables:
    """One dict for several optimizers, as torch's `get_state_dict` builds of a list."""
    names = {id(parameter): name for name, parameter in store.model.named_parameters()}
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        | {"params": [names.get(id(parameter), "?") for parameter in group["params"]]}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    if any("?" in group["params"] for group in groups):
        raise StateError("the optimizer holds parameters that are not the model's; a checkpoint keeps optimizer state by the model's names")
    kept = [item for optimizer in optimizers for item in optimizer.state.items()]
    state = {names[id(parameter)]: dict(slots) for parameter, slots in kept if id(parameter) in names}
    return {"state": state, "param_groups": groups}


def _model_faults(store: Store, model: Mapping[str, Tensor]) -> list[str]:
    wanted = store.model.state_dict()
    stored = [(name, value, held) for name, value in model.items() if (held := find_stored(store, name)) is not None]
    present = {held.key for _, _, held in stored}  # a file may hold one name of a tied parameter, or all
    missing = [name for name in wanted if name not in model and ((held := find_stored(store, name)) is None or held.key not in present)]
    return [
        *[f"{name} is missing" for name in missing],
        *[f"{name} is not in the model" for name in model if name not in wanted],
        *[
            f"{name} is of shape {list(value.shape)}, in the model of {list(held.shape)}"
            for name, value, held in stored
            if tuple(value.shape) != held.shape
        ],
    ]


def _optimizer_faults(store: Store, optim: OptimizerTables) -> list[str]:
    if optim.keys() < {"state", "param_groups"}:
        return ['"optim" is {"state": {parameter: {slot: tensor}}, "param_groups": [...]}, parameters by name']
    named = {name for group in optim["param_groups"] for name in group["params"]}
    keys = {held.key for name in named if isinstance(name, str) and (held := store.find(key_of("parameter", name))) is not None}
    mine = map(store.parameter_key, parameters_of(store.optimizers))
    faults = [f"{store.held[key].name} is in none of its param_groups" for key in mine if key is not None and key not in keys]
    for name, slots in optim["state"].items():
        for slot, value in slots.items():
            held = _find_state(store, name, slot)
            if held is not None and isinstance(value, Tensor) and tuple(value.shape) != held.shape:
                faults.append(f"{name}/{slot} is of shape {list(value.shape)}, in the program of {list(held.shape)}")
    return faults


def _load_model(store: Store, model: Mapping[str, Tensor]) -> None:
    done = set()
    for name, value in model.items():
        held = find_stored(store, name)
        if held is None:
            path, _, last = name.rpartition(".")
            if last == _EXTRA:
                store.model.get_submodule(path).set_extra_state(value)
        elif held.key not in done:
            store.write(held, value)
            done.add(held.key)


def _load_optimizer(store: Store, optim: OptimizerTables, hidden: Mapping[str, Tensor]) -> None:
    entries: dict[str, Mapping[str, object]] = {}
    for name, slots in optim["state"].items():
        parameter = store.find(key_of("parameter", name))
        if parameter is not None:
            entries[parameter.key] = slots
    states = [state for state in store.held.values() if state.of]
    found = {state.key: _in_form(state, entries.get(state.of, {})) for state in states if not state.slot.startswith(HIDDEN)}
    stepped = {state.of for state in states if found.get(state.key) is not None}
    for held in states:
        value = found.pop(held.key, None)
        if held.slot.startswith(HIDDEN) and held.name in hidden:
            store.write(held, _in_parts(held, hidden[held.name]))
        elif held.slot == FIRST and held.of in stepped:
            store.write(held, torch.zeros(held.shape, dtype=held.dtype))
        elif value is not None:
            store.write(held, value if isinstance(value, Tensor) else torch.tensor(value, dtype=held.dtype))
        else:
            store.reset(held)
    for group in (group for optimizer in store.optimizers for group in optimizer.param_groups):
        keys = {store.parameter_key(parameter) for parameter in group["params"]}
        for theirs in optim["param_groups"]:
            if any((mine := store.find(key_of("parameter", name))) is not None and mine.key in keys for name in theirs["params"]):
                for name, value in theirs.items():
                    if name not in ("params", "param_names"):
                        group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def _in_parts(held: StoredTensor, value: Tensor) -> Tensor:
    """Errors of parts of a gradient, for as many parts as the program has: their sum is kept, and each part has an equal share of it."""
    if held.slot != PART_ERRORS or value.shape == held.shape or tuple(value.shape[1:]) != tuple(held.shape[1:]):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return (whole.sum(0, keepdim=True) / held.shape[0]).expand(held.shape).contiguous()


def _in_form(held: StoredTensor, entries: Mapping[str, object]) -> object | None:
    """A state from a checkpoint's entries for its parameter, which may have it in more or fewer bits."""
    if held.fresh is None:
        return entries.get(held.slot)
    return convert_state(held.fresh, entries, lambda value: value.full_tensor() if isinstance(value, DTensor) else value)


def find_stored(store: Store, name: str) -> StoredTensor | None:
    """The stored parameter or buffer of this name in the model."""
    return store.find(key_of("parameter", name)) or store.find(key_of("buffer", name))


def _find_state(store: Store, parameter: str, slot: str) -> StoredTensor | None:
    held = store.find(key_of("parameter", parameter))
    return None if held is None else store.held.get(key_of("state", f"{held.name}/{slot}"))


def _gather_state(store: Store, state: State) -> State:
    """Every tensor whole and on the CPU, gathered one at a time; tied ones once, so that they stay tied."""
    done: dict[str, Tensor] = {}
    root = dist.get_rank() == 0

    def whole(held: StoredTensor | None, value: Value) -> Value | Tensor:
        if held is None:
            return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        if held.key not in done:
            gathered = held.whole()
            done[held.key] = gathered.to("cpu", copy=True) if root else gathered.new_empty(0)
        return done[held.key]

    with torch.no_grad():
        full: State = {"model": {name: whole(find_stored(store, name), value) for name, value in state["model"].items()}}
        if "optim" in state:
            states = state["optim"]["state"].items()
            full["optim"] = {
                "state": {
                    name: {slot: whole(_find_state(store, name, slot), value) for slot, value in slots.items()} for name, slots in states
                },
                "param_groups": [{name: whole(None, value) for name, value in group.items()} for group in state["optim"]["param_groups"]],
            }
        full["meshc"] = state["meshc"].copy()
        if "hidden" in state["meshc"]:
            full["meshc"]["hidden"] = {
                name: whole(store.held[key_of("state", name)], value) for name, value in state["meshc"]["hidden"].items()
            }
    return full if root else {}
