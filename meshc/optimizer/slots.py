"""State slots of a parameter that has not stepped, as the optimizer's own class creates them on a private copy."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshc.errors import CompileError, MeshcError
from meshc.ir.functions import Function
from meshc.optimizer.group_counts import WriteTrackingGroup
from meshc.optimizer.spec import FIRST, IMPLEMENTATION, SQUARES, Slot, group_numbers, is_torchs_own, kind_of, numbers, without_hooks
from meshc.private import FakeTensorMode

_COPIES: Final[weakref.WeakSet[Optimizer]] = weakref.WeakSet()
"""Copies of optimizers that meshc built to step in the place of the originals."""


def is_copy(optimizer: Optimizer) -> bool:
    return optimizer in _COPIES


def with_one_group(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """The optimizer with this one of its groups alone, and the state of all; the functions below take such optimizers."""
    found: Optimizer = object.__new__(type(optimizer))
    found.__dict__.update({**vars(optimizer), "param_groups": [group]})
    return found


def private_copy(optimizer: Optimizer, param: Tensor, entries: Mapping[str, float | Tensor], state: defaultdict[Tensor, Any]) -> Optimizer:
    """A `fresh_copy` with one parameter, of an optimizer with one group. `entries`: numbers, by name, in the place of the group's own."""
    twin = fresh_copy(optimizer, defaultdict(lambda: param))
    group = {name: value for name, value in twin.param_groups[0].items() if name not in ("params", "param_names")}
    for name, value in group.items():
        if isinstance(value, tuple | list):
            value = type(value)(entries.get(f"{name}_{i}", v) for i, v in enumerate(value))
        group[name] = entries.get(name, copy.copy(value) if isinstance(value, dict | set) else value)
    twin.param_groups = [WriteTrackingGroup({"params": [param], **group})]
    twin.state = state
    _COPIES.add(twin)
    return twin


def fresh_copy(optimizer: Optimizer, params: Mapping[int, Tensor]) -> Optimizer:
    """A copy that steps other parameters, `params`: id of the original -> replacement. Torch's plain loops, no state, no hooks; containers
    are copied, so nothing leaks back."""
    twin = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step", "defaults"):  # a scheduler's wrapped `step` calls the original
            continue
        if name.endswith("_hooks"):
            value = OrderedDict()
        elif isinstance(value, dict | list | set):
            value = copy.copy(value) if _holds_objects(value) else copy.deepcopy(value)
        setattr(twin, name, value)
    twin.defaults = _plain(getattr(optimizer, "defaults", {}))  # torch reads `differentiable` from it
    twin.param_groups = [{**_plain(group), "params": [params[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin


def _plain(entries: Mapping[str, object]) -> dict[str, object]:
    return {**entries, **{name: False for name in IMPLEMENTATION if name in entries}}


def _holds_objects(value: dict[object, object] | list[object] | set[object]) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(not isinstance(v, int | float | str | bool | type(None) | tuple | list | dict) for v in items)


class _Inits(Protocol):
    """An optimizer that creates state in `_init_group`, as torch's own do."""

    _init_group: Function


class _FirstValueRecorder(dict):
    """State of a parameter that records each entry's first value, in `first`."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.first: dict[str, object] = {}

    def __setitem__(self, name: str, value: object) -> None:
        if name not in self and name not in self.first:
            self.first[name] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)

    def get(self, name: str, default: object = None) -> Any:
        """As in `state["step"] = state.get("step", 0) + 1`: the default is the value before the first step."""
        if name not in self and isinstance(default, Tensor | int | float):
            self.first.setdefault(name, default)
        return super().get(name, default)

    setdefault = MutableMapping.setdefault  # by `__setitem__`, as these of a dict are not
    update = MutableMapping.update


def _sample_step(optimizer: Optimizer, param: Tensor, seed: int) -> Optimizer:
    """A copy that has stepped `param`, or, of torch's own classes, has created its state. With seed 2 the group's floats differ too."""
    others = {} if seed != 2 else {
        name: 0.75 * value
        for name, value in group_numbers(optimizer, optimizer.param_groups[0]).items()
        if not isinstance(value, int)  # for instance a block length
    }
    generator = torch.Generator().manual_seed(1000 + seed)  # not the parameter's own draws
    drawn = None if seed < 0 else torch.randn(param.shape, generator=generator, dtype=torch.float64)
    try:
        twin = private_copy(optimizer, param, others, defaultdict(_FirstValueRecorder))
        param.grad = torch.empty_like(param) if drawn is None else drawn.to(param.dtype)
        with torch.no_grad():
            if is_torchs_own(optimizer):
                create_state(twin)
            else:
                without_hooks(type(twin).step)(twin)
    except MeshcError:
        raise
    except Exception as error:
        raise CompileError(f"{type(optimizer).__qualname__} could not take a step on its own: {error}") from error
    return twin


def create_state(twin: Optimizer) -> None:
    init_group = cast(_Inits, twin)._init_group
    lists = list(inspect.signature(init_group).parameters)[1:]
    init_group(twin.param_groups[0], *([] for _ in lists))


def fresh_slots(optimizer: Optimizer, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Slot, ...]:
    """The slots of a parameter that has not stepped, from the class's own initialisation on small tensors and on fake ones."""
    if kind_of(optimizer, optimizer.param_groups[0]) == "sgd":
        if optimizer.param_groups[0]["momentum"] == 0:
            return ()
        return (
            Slot("momentum_buffer", "like_param", shape, dtype, 0.0, from_first_step=True),
            Slot(FIRST, "scalar", (), torch.float32, 1.0),
        )
    small = sample_shape(optimizer, shape, dtype)
    born: list[tuple[Tensor, dict[str, object]]] = []
    for seed in (1, 2):
        values = torch.randn(small, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        param = nn.Parameter(values.to(dtype))
        before = param.detach().clone()
        born.append((before, _initial_state(optimizer, param, seed)))
    full = _initial_state_at(optimizer, shape, dtype, born[0][1], small)
    wide = _initial_state_at(optimizer, (3,), dtype, {}, ()) if shape == () else full
    known_squares = is_torchs_own(optimizer) or kind_of(optimizer, optimizer.param_groups[0]) != "other"
    slots: list[Slot] = []
    for name, value in full.items():
        if not isinstance(value, Tensor | int | float):
            raise CompileError(
                f"{type(optimizer).__qualname__} keeps state[{name!r}] of type {type(value).__name__}; a program can hold tensors "
                "and numbers only."
            )
        size, kind = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ((), torch.float64)
        other = wide.get(name, value)
        is_scalar = not isinstance(other, Tensor) or other.dim() == 0
        fill, differs = _fill([(before, entries[name]) for before, entries in born])
        slots.append(
            Slot(
                name,
                "scalar" if is_scalar else "like_param" if size == shape else "other",
                size,
                kind,
                fill,
                not isinstance(value, Tensor),
                differs,
                signed=not (known_squares and name in SQUARES),
            )
        )
    if any(slot.from_first_step for slot in slots):
        slots.append(Slot(FIRST, "scalar", (), torch.float32, 1.0))
    return tuple(slots)


def written_numbers(optimizer: Optimizer) -> list[str]:
    """Names of the group's numbers that a step sets; none for torch's own classes."""
    group = optimizer.param_groups[0]
    if is_torchs_own(optimizer) or kind_of(optimizer, group) != "other" or not group["params"]:
        return []
    first = group["params"][0]
    shape = sample_shape(optimizer, tuple(first.shape), first.dtype)
    twin = _sample_step(optimizer, nn.Parameter(torch.ones(shape, dtype=first.dtype)), 1)
    watched = cast(WriteTrackingGroup, twin.param_groups[0])
    return [name for name in numbers(optimizer)[0] if name in watched.written]


def sample_shape(optimizer: Optimizer, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of a small sample in the place of a parameter of `shape`: a few rows, or `shape` itself where the optimizer cannot step so
    few (it splits rows into blocks). Raises CompileError if the optimizer can step neither."""
    small = tuple(min(size, 3 + i) for i, size in enumerate(shape))
    try:
        _initial_state(optimizer, nn.Parameter(torch.ones(small, dtype=dtype)), 1)
    except CompileError:
        _initial_state(optimizer, nn.Parameter(torch.ones(shape, dtype=dtype)), 1)
        return shape
    return small


def _initial_state_at(
    optimizer: Optimizer,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    known: dict[str, object],
    small: tuple[int, ...],
) -> dict[str, object]:
    """State entries at a parameter's full size, for their shapes only; `known` are the entries of a parameter of shape `small`."""
    if known and small == shape:
        return known
    if is_torchs_own(optimizer):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _initial_state(optimizer, nn.Parameter(torch.empty(shape, dtype=dtype)), -1)
    if known and all(not isinstance(v, Tensor) or tuple(v.shape) in ((), small) for v in known.values()):
        return {n: torch.empty(shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) and v.dim() else v for n, v in known.items()}
    return _initial_state(optimizer, nn.Parameter(torch.ones(shape, dtype=dtype)), 1)


def _initial_state(optimizer: Optimizer, param: Tensor, seed: int) -> dict[str, object]:
    """State entries of `param` as the class creates them."""
    twin = _sample_step(optimizer, param, seed)
    return twin.state[param].first if param in twin.state else {}


def _fill(samples: Sequence[tuple[Tensor, Any]]) -> tuple[float | None, bool]:
    """(constant, or None for a copy of the parameter; whether the entry depends on the gradient or the numbers of its first step)."""
    values = [value if isinstance(value, Tensor) else torch.tensor(float(value)) for _, value in samples]
    constants = [_constant(v) for v in values]
    if constants[0] is not None and constants[0] == constants[1]:
        return constants[0], False
    if all(v.shape == before.shape and torch.equal(v.to(before.dtype), before) for (before, _), v in zip(samples, values, strict=True)):
        return None, False
    return constants[0] or 0.0, True


def _constant(value: Tensor) -> float | None:
    if value.numel() == 0:
        return 0.0
    if value.is_complex():
        value = torch.view_as_real(value)
    first = value.flatten()[0]
    return float(first) if bool((value == first).all()) else None
