"""Pretrained weights loaded into a compiled model: each rank reads the ranges of its tiles, a tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from meshc.errors import StateError, join_names, lines_of
from meshc.files.tensor_file import TensorReader
from meshc.files.weight_files import Weights
from meshc.ir.keys import key_of
from meshc.runtime.comm.stage_transfers import StageTransfers
from meshc.runtime.state import adoption
from meshc.runtime.state.state_dicts import find_stored
from meshc.runtime.state.store import Store
from meshc.runtime.state.stored_tensor import StoredTensor

_FLOATS: Final = ("F16", "BF16", "F32", "F64")


def load(store: Store, weights: Weights, where: str, expected: Callable[[str], bool] = lambda name: True) -> None:
    """Reads all tensors that both the model and the files have; others of the model count as missing if their names are `expected`. Raises
    StateError, before anything is changed, naming tensors that do not fit, and missing ones without values; warns of missing ones that keep
    their values, and of tensors that the model does not have."""
    store.adopt_changes()
    wanted = [name for name in store.model.state_dict() if expected(name)]
    pairs: dict[str, tuple[StoredTensor, str]] = {}
    for name in weights.names:
        held = find_stored(store, name)
        if held is not None:
            pairs.setdefault(held.key, (held, name))
    missing = [name for name in wanted if (held := find_stored(store, name)) is not None and held.key not in pairs]
    _refuse(store, weights, pairs, missing, where)
    if missing:
        warnings.warn(f"{join_names(missing, 6)} of the model are not in {where}, and keep the values that they have", stacklevel=4)
    strange = [name for name in weights.names if find_stored(store, name) is None]
    if strange:
        warnings.warn(f"{join_names(strange, 6)} in {where} are not in the model, and are left out", stacklevel=4)
    for held, name in pairs.values():
        write_tensor(store, held, weights, name)
    reset_copied_state(store, pairs.keys())


def write_tensor(store: Store, held: StoredTensor, weights: TensorReader, name: str) -> None:
    """Writes the file's tensor `name` to a stored tensor: this rank reads its own tile."""
    home = held.home
    if not isinstance(home, StageTransfers) or home.member or held.lags:
        with torch.no_grad():
            store.write_tile(held, weights.tile(name, held.sharding, home.sizes, home.coordinates))


def reset_copied_state(store: Store, keys: Collection[str]) -> None:
    """Resets optimizer state that begins as a copy of one of these parameters."""
    with torch.no_grad():
        for held in store.held.values():
            if held.of in keys and held.fresh is not None and held.fresh.fill is None:
                store.reset(held)


def fill_buffers(store: Store, fill: Callable[[nn.Module], object]) -> None:
    """Fills buffers that no file holds: those of a model from `meta` that state dicts leave out. `fill(module)` is called for each module
    that has some, with empty buffers on the CPU and parameters on `meta`; it has to write the same values on all ranks."""
    empty = {name for name in store.unfilled_names if store.find(key_of("buffer", name)) is not None}
    modules = [(path, module) for path, module in store.model.named_modules() if empty & {_name(path, name) for name in module._buffers}]
    for path, module in modules:
        for name, value in _fill_module(module, fill).items():
            held = store.find(key_of("buffer", _name(path, name)))
            if held is not None and held.name in empty:
                store.write_tile(held, value.to(held.dtype))


def _name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _fill_module(module: nn.Module, fill: Callable[[nn.Module], object]) -> Mapping[str, Tensor]:
    """The values that `fill` writes into the buffers of a module; the module is restored."""
    held = [(one, dict(one._parameters), dict(one._buffers)) for one in module.modules()]
    empty = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in module._buffers.items() if value is not None}
    try:
        for one, parameters, _ in held:
            for name, parameter in parameters.items():
                if parameter is not None:
                    one._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), False)
        module._buffers.update(empty)
        for value in empty.values():
            adoption.mark_empty(value)
        with torch.no_grad():
            fill(module)
        return {name: value for name, value in module._buffers.items() if value is not None and adoption.is_filled(value)}
    finally:
        for one, parameters, buffers in held:
            one._parameters.update(parameters)
            one._buffers.update(buffers)


def _refuse(store: Store, weights: Weights, pairs: Mapping[str, tuple[StoredTensor, str]], missing: Sequence[str], where: str) -> None:
    faults = []
    for held, name in pairs.values():
        if weights.shape(name) != held.shape:
            faults.append(f"{name} is of shape {list(weights.shape(name))}, in the model of {list(held.shape)}")
        elif (weights.kind(name) in _FLOATS) != held.dtype.is_floating_point:
            faults.append(f"{name} is kept in {weights.kind(name)}, and is {held.dtype} in the model")
    if not pairs:
        theirs, mine = join_names(sorted(weights.names), 3), join_names(list(store.model.state_dict()), 3)
        faults.append(f"none of its names is one of the model's: it has {theirs}, the model {mine}")
    if faults:
        advice = "build the model from the configuration that lies beside them"
        raise StateError(f"the weights in {where} do not fit the model:\n    {lines_of(faults, 8)}\n  what to do: {advice}")
    empty = set(store.unfilled_names) & {one.name for name in missing if (one := find_stored(store, name)) is not None}
    if empty:
        raise StateError(
            f"the model was built on `meta`, and {where} has no values for {join_names(sorted(empty), 6)}\n"
            "  what to do: program.init_weights(fn) first, and then load_pretrained, which leaves what it does not have"
        )
