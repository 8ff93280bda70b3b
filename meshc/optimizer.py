"""From a `torch.optim` optimizer to the operators of a program, and back.

`describe(optimizer)` says what a compiler needs to know: the state slots of each parameter, the numbers that are read at each call, what
the program was specialised to. `update_nodes` then writes one parameter's update through a callback, so that the same code serves
`torch.fx` nodes and plain tensors:

    spec = describe(optimizer)
    group = spec.group_of(parameter)
    new_param, new_state = update_nodes(group, param, grad, state, numbers, call=lambda op, *args, **kwargs: op(*args, **kwargs))

Adam, AdamW and SGD become the `meshc::` updates. Every other optimizer is *traced*: its own `step` runs once on fake tensors, on a private
copy, with state and numbers as inputs. What Python would have computed on floats (`1 - beta1 ** step`) is computed on 0-dim float64
tensors; where Python branches on data (`if rho > 5`), both branches are traced and joined by `where`; where it branches on a number of the
group (`if weight_decay != 0`), the outcome is a guard, part of the key under which the program was compiled.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from meshc.errors import CompileError, InputError, MeshcError, StateError
from meshc.ops import optim as _updates  # noqa: F401  registers the operators

HIDDEN = "meshc."
"""Prefix of state slots that a program keeps and `optimizer.state` does not know."""

FIRST = HIDDEN + "first"
"""1.0 until the parameter's first update, then 0.0, for optimizers whose first step differs."""

_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "initial_momentum", "base_momentum", "max_momentum")  # entries that schedulers add
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # how torch computes, not what
_ADAM_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
_SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
_MAX_BRANCHES = 5  # each doubles the paths


@dataclass(frozen=True)
class Slot:
    """One state tensor of one parameter.

    `shape` is "like_param", "scalar" or "other" (then `size` is not derived from the parameter's). A fresh slot is filled with `fill`, or
    is a copy of the parameter where `fill` is None. `value` is the optimizer's own tensor when it has stepped or loaded a state dict.
    `python`: the optimizer keeps a Python number there; a program holds a 0-dim float64 tensor, and so does `optimizer.state` from then on.
    `from_first_step`: torch derives the initial value from the first step's gradient or numbers, and so does the program.
    """

    name: str
    shape: str
    size: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None
    python: bool = False
    from_first_step: bool = False
    value: Tensor | None = field(default=None, compare=False)

    @property
    def hidden(self) -> bool:
        return self.name.startswith(HIDDEN)

    def initial(self, param: Tensor) -> Tensor:
        """A new tensor with the value before the next step; scalars lie on the CPU, others on the parameter's device."""
        if self.value is not None:
            return self.value.detach().clone()
        if self.fill is None:
            return param.detach().clone()
        if self.shape == "like_param":
            return torch.full_like(param, self.fill, dtype=self.dtype, memory_format=torch.preserve_format, requires_grad=False)
        return torch.full(self.size, self.fill, dtype=self.dtype, device="cpu" if self.shape == "scalar" else param.device)


@dataclass(frozen=True)
class Guard:
    """What a program assumes of one number: `number <relation> constant` has this outcome, or (relation "is") it has this very value."""

    number: str
    relation: str
    constant: float = 0.0

    def outcome(self, numbers: Mapping[str, float]) -> float | bool:
        value = numbers[self.number]
        return value if self.relation == "is" else bool(_RELATIONS[self.relation](value, self.constant))


@dataclass(frozen=True)
class TracedUpdate:
    """One parameter's update as a graph of aten operators on global shapes.

    Placeholders are, in order, `inputs`: "param", "grad", "state:NAME", "number:NAME"; results, in order, `outputs`: "param", "state:NAME".
    Numbers and scalar state are 0-dim and lie on one device with the rest.
    """

    graph: GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class GroupSpec:
    """One entry of `param_groups`.

    `kind` is "adam", "adamw", "sgd" or "other". `numbers` are read at each call; `flags` and the outcomes of `guards` are compiled in.
    """

    index: int
    kind: str
    optimizer: str
    flags: tuple[tuple[str, Hashable], ...]
    numbers: tuple[str, ...]
    guards: tuple[Guard, ...]
    params: tuple[Tensor, ...]
    slots: tuple[tuple[Slot, ...], ...]
    traced: Mapping[tuple[tuple[int, ...], torch.dtype], TracedUpdate] = field(default_factory=dict)

    def flag(self, name: str) -> Any:
        return dict(self.flags)[name]

    def slots_of(self, param: Tensor) -> tuple[Slot, ...]:
        return next(slots for p, slots in zip(self.params, self.slots, strict=True) if p is param)


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """What `describe` found. `key` is a hashable value; a program serves as long as `key_of(optimizer)` equals it."""

    optimizer: str
    groups: tuple[GroupSpec, ...]
    key: tuple[tuple[str, Hashable], ...]

    def group_of(self, param: Tensor) -> GroupSpec:
        for group in self.groups:
            if any(p is param for p in group.params):
                return group
        raise StateError(f"{self.optimizer}: a parameter of shape {tuple(param.shape)} is in none of its {len(self.groups)} groups")

    def slots_of(self, param: Tensor) -> tuple[Slot, ...]:
        return self.group_of(param).slots_of(param)

    def key_of(self, optimizer: torch.optim.Optimizer) -> tuple[tuple[str, Hashable], ...]:
        return _key(optimizer, [group.guards for group in self.groups])


# What torch's optimizers hold in a group.


def _unhooked(function: Any) -> Any:
    """`step` as written: `Optimizer.__init__` wraps each class's once, to run hooks."""
    return function.__wrapped__ if getattr(function, "hooked", False) else function


def _follows(optimizer: torch.optim.Optimizer, base: type[torch.optim.Optimizer]) -> bool:
    kind = type(optimizer)
    return (
        isinstance(optimizer, base) and _unhooked(kind.step) is _unhooked(base.step) and kind._init_group is base._init_group  # type: ignore[attr-defined]
    )


def _is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """torch's classes create their state in `_init_group`, before a step, and are traced right (the tests hold them to it)."""
    return type(optimizer).__module__.startswith("torch.optim") and hasattr(optimizer, "_init_group")


def _kind(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    if _follows(optimizer, torch.optim.Adam):
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    return "sgd" if _follows(optimizer, torch.optim.SGD) else "other"


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entries(group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(numbers, flags) of an optimizer without operator: numbers, also in tuples, are read at each call, all else is compiled in."""
    numbers: dict[str, Any] = {}
    flags: dict[str, Any] = {}
    for name, value in group.items():
        if name in ("params", "param_names", *_SCHEDULERS, *_IMPLEMENTATION):
            continue
        if _is_number(value):
            numbers[name] = value
        elif isinstance(value, tuple | list) and any(_is_number(v) for v in value):
            for i, v in enumerate(value):
                (numbers if _is_number(v) else flags)[f"{name}_{i}"] = v
        else:
            flags[name] = value
    return numbers, flags


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _group_numbers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    kind = _kind(optimizer, group)
    if kind in ("adam", "adamw"):
        beta1, beta2 = group["betas"]
        return dict(zip(_ADAM_NUMBERS, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"]), strict=True))
    if kind == "sgd":
        return {name: group[name] for name in _SGD_NUMBERS}
    return _entries(group)[0]


def _group_flags(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    kind = _kind(optimizer, group)
    if kind in ("adam", "adamw"):
        flags = {"amsgrad": bool(group["amsgrad"]), "maximize": bool(group["maximize"]), "decoupled": kind == "adamw"}
    elif kind == "sgd":
        flags = {"nesterov": bool(group["nesterov"]), "maximize": bool(group["maximize"]), "momentum": bool(group["momentum"] != 0)}
    else:
        flags = _entries(group)[1]
    return tuple((name, _hashable(value)) for name, value in flags.items())


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The numbers of each group as they stand now, in the group's order; tensors are read."""
    return [
        {name: float(value.item() if isinstance(value, Tensor) else value) for name, value in _group_numbers(optimizer, group).items()}
        for group in optimizer.param_groups
    ]


def _key(optimizer: torch.optim.Optimizer, guards: Sequence[Sequence[Guard]]) -> tuple[tuple[str, Hashable], ...]:
    entries: list[tuple[str, Hashable]] = [("optimizer", type(optimizer).__qualname__), ("number of groups", len(optimizer.param_groups))]
    values = numbers(optimizer)
    for i, (group, now) in enumerate(zip(optimizer.param_groups, values, strict=True)):
        where = f"group {i}: "
        entries.append((where + "number of parameters", len(group["params"])))
        entries.append((where + "numbers", tuple(now)))
        entries += [(where + name, value) for name, value in _group_flags(optimizer, group)]
        for guard in guards[i] if i < len(guards) else ():
            if guard.number in now:
                name = guard.number if guard.relation == "is" else f"{guard.number} {guard.relation} {guard.constant:g}"
                entries.append((where + name, guard.outcome(now)))
    return tuple(entries)


def key(optimizer: torch.optim.Optimizer, spec: OptimizerSpec | None = None) -> tuple[tuple[str, Hashable], ...]:
    """What a compiled program depends on: flags, and the outcomes of Python's branches on numbers. `spec.key_of` is the cheap form."""
    return (spec or describe(optimizer)).key_of(optimizer)


def changes(old: Sequence[tuple[str, Hashable]], new: Sequence[tuple[str, Hashable]]) -> list[str]:
    """Why a program must be compiled again, one line a difference: `group 0: weight_decay != 0: False -> True`."""
    before, after = dict(old), dict(new)
    names = [*before, *(name for name in after if name not in before)]
    return [f"{n}: {before.get(n, 'absent')} -> {after.get(n, 'absent')}" for n in names if before.get(n) != after.get(n)]


# Describe.


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__qualname__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise CompileError(
            f"{name} evaluates the model several times in a step through a closure. A compiled step is one forward, one backward "
            "and one update: use an optimizer that steps without a closure, or compile the module and keep LBFGS in eager code."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise CompileError(f"{name} takes sparse gradients, which a program does not have. Use Adam, and sparse=False in the embedding.")
    parameters = list(inspect.signature(_unhooked(type(optimizer).step)).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if needed:
        raise CompileError(f"{name}.step needs {', '.join(needed)}. A compiled step calls step() alone: give them defaults.")
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout != torch.strided:
                raise CompileError(f"{name}: parameter {j} of group {i} has a sparse gradient. Use sparse=False in the embedding.")


def describe(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Read an optimizer without touching it; optimizers without a `meshc::` update are traced, once for each shape and dtype in a group.

    Raises CompileError, naming the optimizer, where its step cannot be expressed: closures, sparse gradients, step counts kept outside the
    state, float() or math functions of data. A user's own class is also run for three steps on small tensors and compared with its trace.
    """
    _refuse(optimizer)
    groups: list[GroupSpec] = []
    for i, group in enumerate(optimizer.param_groups):
        kind = _kind(optimizer, group)
        params = tuple(group["params"])
        names = tuple(_group_numbers(optimizer, group))
        flags = _group_flags(optimizer, group)
        fresh: dict[tuple[tuple[int, ...], torch.dtype], tuple[Slot, ...]] = {}
        traced: dict[tuple[tuple[int, ...], torch.dtype], TracedUpdate] = {}
        guards: list[Guard] = [Guard("weight_decay", "!=")] if kind != "other" else []
        if kind == "other" and any(p.is_complex() for p in params):
            raise CompileError(
                f"{type(optimizer).__qualname__}: group {i} has complex parameters, which only Adam, AdamW and SGD take here."
            )
        if kind == "other" and not _is_torchs_own(optimizer):
            _check_against_itself(optimizer, i)
        for p in params:
            signature = (tuple(p.shape), p.dtype)
            if signature in fresh:
                continue
            fresh[signature] = _fresh_slots(optimizer, i, *signature)
            if kind == "other":
                traced[signature], found = _trace(optimizer, i, *signature, fresh[signature])
                guards += [g for g in found if g not in guards]
        slots = tuple(_with_values(fresh[tuple(p.shape), p.dtype], optimizer.state.get(p)) for p in params)
        groups.append(GroupSpec(i, kind, type(optimizer).__qualname__, flags, names, tuple(guards), params, slots, traced))
    return OptimizerSpec(type(optimizer).__qualname__, tuple(groups), _key(optimizer, [g.guards for g in groups]))


def _with_values(slots: Sequence[Slot], state: Mapping[str, Any] | None) -> tuple[Slot, ...]:
    """Slots with the tensors that a resumed optimizer holds."""
    if not state:
        return tuple(slots)
    present = any(state.get(slot.name) is not None for slot in slots if not slot.hidden)
    held: list[Slot] = []
    for slot in slots:
        value = state.get(slot.name)
        if slot.name == FIRST and present:
            held.append(replace(slot, fill=0.0))
        elif value is None:
            held.append(slot)
        else:
            tensor = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=slot.dtype)
            held.append(replace(slot, dtype=tensor.dtype, value=tensor))
    return tuple(held)


# Emit.


def update_nodes(
    group: GroupSpec,
    param: Any,
    grad: Any,
    state: Mapping[str, Any],
    numbers: Mapping[str, Any],
    call: Callable[..., Any],
    like: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """Write one parameter's update; returns its new value and its new state, one entry a slot.

    `param`, `grad`, the values of `state` and `numbers` are opaque: graph nodes, or tensors. `call(op, *args, **kwargs)` adds one operator.
    A traced update depends on the parameter's global shape and dtype, read from `like` (default: `param` itself).
    """
    if group.kind in ("adam", "adamw"):
        amsgrad = group.flag("amsgrad")
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ()), "step")
        op = torch.ops.meshc.adam_amsgrad.default if amsgrad else torch.ops.meshc.adam.default
        given = [state[name] for name in names] + [numbers[name] for name in _ADAM_NUMBERS]
        result = call(op, param, grad, *given, group.flag("decoupled"), group.flag("maximize"))
    elif group.kind == "sgd" and group.flag("momentum"):
        names = ("momentum_buffer", FIRST)
        given = [state[name] for name in names] + [numbers[name] for name in _SGD_NUMBERS]
        result = call(torch.ops.meshc.sgd.default, param, grad, *given, group.flag("nesterov"), group.flag("maximize"))
    elif group.kind == "sgd":
        plain = call(torch.ops.meshc.sgd_plain.default, param, grad, numbers["lr"], numbers["weight_decay"], group.flag("maximize"))
        return plain, {}
    else:
        return _inline(group, param, grad, state, numbers, call, param if like is None else like)
    return call(operator.getitem, result, 0), {name: call(operator.getitem, result, i) for i, name in enumerate(names, 1)}


def _inline(
    group: GroupSpec, param: Any, grad: Any, state: Mapping[str, Any], numbers: Mapping[str, Any], call: Callable[..., Any], like: Any
) -> tuple[Any, dict[str, Any]]:
    update = group.traced.get((tuple(like.shape), like.dtype))
    if update is None:
        raise InputError(
            f"{group.optimizer}: no update was traced for a parameter of shape {tuple(like.shape)} and {like.dtype} in group "
            f"{group.index}. Pass the described parameter as `like`."
        )
    sources = {"param": param, "grad": grad}
    sources |= {f"state:{name}": value for name, value in state.items()} | {f"number:{name}": value for name, value in numbers.items()}
    values: dict[Node, Any] = {}
    inputs = iter(update.inputs)
    for node in update.graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = sources[next(inputs)]
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = call(node.target, *args, **kwargs)
    (output,) = [node for node in update.graph.graph.nodes if node.op == "output"]
    results = dict(zip(update.outputs, [values[node] for node in output.args[0]], strict=True))
    return results.pop("param"), {name.removeprefix("state:"): value for name, value in results.items()}


# Back to the live optimizer.


def attach_state(optimizer: torch.optim.Optimizer, params: Mapping[Tensor, Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Replace parameters in place and give them state.

    `params` maps an old parameter to the new one; `states` maps a parameter, old or new, to its slots by name. Order, other entries of the
    groups, and state that is not replaced stay; hidden slots are left out, so that the layout is torch's own.
    """
    known = [p for group in optimizer.param_groups for p in group["params"]]
    replaced = {id(p): params[p] if p in params else p for p in known}
    new = {id(p) for p in replaced.values()}
    strangers = [p for p in params if id(p) not in replaced] + [p for p in states if id(p) not in replaced and id(p) not in new]
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:4])
        raise StateError(
            f"{type(optimizer).__qualname__}: {len(strangers)} parameters (shapes {shapes}) are not in its groups. "
            "Build the optimizer from the parameters of the model that is compiled."
        )
    for group in optimizer.param_groups:
        group["params"][:] = [replaced[id(p)] for p in group["params"]]
    kept = list(optimizer.state.items())
    optimizer.state.clear()
    for old, state in kept:
        optimizer.state[replaced.get(id(old), old) if isinstance(old, Tensor) else old] = state
    for p, slots in states.items():
        optimizer.state[replaced.get(id(p), p)].update({name: value for name, value in slots.items() if not name.startswith(HIDDEN)})


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped; torch sets the same flag in the `step` that they wrap."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# Tracing an optimizer that has no operator: the private copy it runs on.


def _private(optimizer: torch.optim.Optimizer, index: int, param: Tensor, entries: Mapping[str, Any], state: dict[Any, Any]) -> Any:
    """A copy with one group and one parameter, torch's plain implementation, no hooks; containers are copied, so nothing leaks back."""
    twin: Any = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):  # a scheduler's wrapped `step` calls the original
            continue
        if name.endswith("_hooks"):
            value = OrderedDict()
        elif isinstance(value, dict | list | set):
            value = copy.copy(value) if _holds_objects(value) else copy.deepcopy(value)
        setattr(twin, name, value)
    group = {name: value for name, value in optimizer.param_groups[index].items() if name not in ("params", "param_names")}
    group |= {name: False for name in _IMPLEMENTATION if name in group}
    for name, value in group.items():
        if isinstance(value, tuple | list):
            value = type(value)(entries.get(f"{name}_{i}", v) for i, v in enumerate(value))
        group[name] = entries.get(name, copy.copy(value) if isinstance(value, dict | set) else value)
    twin.param_groups = [{"params": [param], **group}]
    twin.state = state
    return twin


def _holds_objects(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(not isinstance(v, int | float | str | bool | type(None) | tuple | list | dict) for v in items)


class _Recorder(dict):
    """A parameter's state that keeps each entry as it was when first put in."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            self.first[name] = value.detach().clone() if isinstance(value, Tensor) else value
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def _state_at_birth(optimizer: torch.optim.Optimizer, index: int, param: Tensor, seed: int) -> dict[str, Any]:
    """State entries as the class creates them. torch's own classes do so in `_init_group`, without a step. Seed 2 has other numbers too."""
    present = numbers(optimizer)[index] if seed == 2 else {}
    twin = _private(optimizer, index, param, {name: 0.75 * value for name, value in present.items()}, defaultdict(_Recorder))
    generator = torch.Generator().manual_seed(1000 + seed)  # not the parameter's own draws
    param.grad = torch.empty_like(param) if seed < 0 else torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
    with torch.no_grad():
        if _is_torchs_own(optimizer):
            _create_state(twin)
        else:
            _unhooked(type(twin).step)(twin)
    return twin.state[param].first if param in twin.state else {}


def _create_state(twin: Any) -> None:
    lists = list(inspect.signature(twin._init_group).parameters)[1:]
    twin._init_group(twin.param_groups[0], *([] for _ in lists))


def _fresh_slots(optimizer: torch.optim.Optimizer, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Slot, ...]:
    """The slots of a parameter that has not stepped, from the class's own initialisation on small tensors and on fake ones."""
    if _kind(optimizer, optimizer.param_groups[index]) == "sgd":
        if optimizer.param_groups[index]["momentum"] == 0:
            return ()
        return (
            Slot("momentum_buffer", "like_param", shape, dtype, 0.0, from_first_step=True),
            Slot(FIRST, "scalar", (), torch.float32, 1.0),
        )
    small = tuple(min(size, 3 + i) for i, size in enumerate(shape))
    born: list[tuple[Tensor, dict[str, Any]]] = []
    for seed in (1, 2):
        values = torch.randn(small, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        param = torch.nn.Parameter(values.to(dtype))
        before = param.detach().clone()
        born.append((before, _born(optimizer, index, param, seed)))
    full = _born_at(optimizer, index, shape, dtype, born[0][1], small)
    wide = _born_at(optimizer, index, (3,), dtype, {}, ()) if shape == () else full
    slots: list[Slot] = []
    first_differs = False
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
        first_differs |= differs
        slots.append(
            Slot(
                name,
                "scalar" if is_scalar else "like_param" if size == shape else "other",
                size,
                kind,
                fill,
                not isinstance(value, Tensor),
                differs,
            )
        )
    if first_differs:
        slots.append(Slot(FIRST, "scalar", (), torch.float32, 1.0))
    return tuple(slots)


def _born_at(
    optimizer: torch.optim.Optimizer, index: int, shape: tuple[int, ...], dtype: torch.dtype, known: dict[str, Any], small: tuple[int, ...]
) -> dict[str, Any]:
    """Entries at a parameter's full size, for their shapes only; `known` are those of a parameter of shape `small`."""
    if known and small == shape:
        return known
    if _is_torchs_own(optimizer):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _born(optimizer, index, torch.nn.Parameter(torch.empty(shape, dtype=dtype)), -1)
    if known and all(not isinstance(v, Tensor) or tuple(v.shape) in ((), small) for v in known.values()):
        return {n: torch.empty(shape, dtype=v.dtype, device="meta") if isinstance(v, Tensor) and v.dim() else v for n, v in known.items()}
    return _born(optimizer, index, torch.nn.Parameter(torch.ones(shape, dtype=dtype)), 1)


def _born(optimizer: torch.optim.Optimizer, index: int, param: Tensor, seed: int) -> dict[str, Any]:
    try:
        return _state_at_birth(optimizer, index, param, seed)
    except MeshcError:
        raise
    except Exception as error:
        raise CompileError(f"{type(optimizer).__qualname__} could not take a step on its own: {error}") from error


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


# Tracing: numbers as 0-dim tensors, branches as `where`.

_RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "!=": operator.ne, "==": operator.eq, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip
_COMPARISONS = {
    "__ne__": "!=", "ne": "!=", "__eq__": "==", "eq": "==", "__gt__": ">", "gt": ">", "__lt__": "<", "lt": "<", "__ge__": ">=", "ge": ">=",
    "__le__": "<=", "le": "<=",
}  # fmt: skip
_PYTHON: dict[str, Callable[..., Any]] = {
    "add": operator.add, "__add__": operator.add, "__radd__": operator.add, "sub": operator.sub, "__sub__": operator.sub,
    "__rsub__": lambda a, b: b - a, "mul": operator.mul, "__mul__": operator.mul, "__rmul__": operator.mul, "div": operator.truediv,
    "__truediv__": operator.truediv, "__rtruediv__": lambda a, b: b / a, "__rdiv__": lambda a, b: b / a, "pow": operator.pow,
    "__pow__": operator.pow, "__rpow__": lambda a, b: b**a, "neg": operator.neg, "__neg__": operator.neg, "sqrt": lambda a: a**0.5,
    "abs": abs, "__abs__": abs, "item": lambda a: a, "__pos__": lambda a: a,
    **{name: _RELATIONS[relation] for name, relation in _COMPARISONS.items()},
}  # fmt: skip
_AUGMENTED = {
    "__iadd__": "__add__", "__isub__": "__sub__", "__imul__": "__mul__", "__itruediv__": "__truediv__", "__idiv__": "__truediv__",
    "__ipow__": "__pow__",
}  # fmt: skip
_METADATA = ("dim", "size", "numel", "stride", "is_floating_point", "is_complex", "element_size", "is_contiguous", "__len__")


_ATTRIBUTES: Any = Tensor  # to a type checker, `Tensor.grad` is a value, not a descriptor


class _Branch(BaseException):
    """Python asks for the truth of a value that only the run will know. Not an Exception: an optimizer's own handlers must not see it."""

    def __init__(self, condition: Tensor) -> None:
        self.condition = condition


@dataclass
class _Number:
    """A 0-dim float64 (or bool) tensor that stands for a Python number. `value` is known if it depends on the group's numbers only."""

    tensor: Tensor  # held so that its id stays its own
    value: float | bool | None
    names: frozenset[str]
    is_input: bool = False
    relation: tuple[str, str, float] | None = None  # (number, relation, constant) if it is one comparison of an input


class _NumbersAsTensors(TorchFunctionMode):
    """Runs a step written for Python floats on 0-dim tensors.

    Sees each torch call before its arguments are parsed, so a tensor where a scalar belongs (`add_(g, alpha=-lr)`) is rewritten to
    arithmetic, `.item()` stays a tensor, and `bool()` decides or branches. A call that insists on a float gets the number's present value,
    and that is recorded as a guard.
    """

    def __init__(self, name: str, decisions: Sequence[bool]) -> None:
        super().__init__()
        self.name = name
        self.decisions = list(decisions)
        self.known: dict[int, _Number] = {}
        self.scalar_state: dict[int, Tensor] = {}
        self.grads: dict[int, tuple[Tensor, Tensor]] = {}
        self.guards: list[Guard] = []

    def number(self, tensor: Tensor, value: float | bool | None = None, names: frozenset[str] = frozenset()) -> Tensor:
        self.known[id(tensor)] = _Number(tensor, value, names)
        return tensor

    def _lookup(self, value: Any) -> _Number | None:
        return self.known.get(id(value)) if isinstance(value, Tensor) else None

    def _guard(self, guard: Guard) -> None:
        if guard not in self.guards:
            self.guards.append(guard)

    def _specialise(self, number: _Number, why: str) -> float | bool:
        if number.value is None:
            raise CompileError(
                f"{self.name}.step uses {why} on a value that changes from step to step (a step count, or one computed from "
                "gradients), which would be compiled in as a constant. Write it with tensor operations (x ** 0.5 instead of "
                "math.sqrt(x)), or keep it a tensor in the state."
            )
        for name in sorted(number.names):
            self._guard(Guard(name, "is"))
        return number.value

    def _truth(self, value: Tensor) -> bool:
        number = self._lookup(value)
        if number is not None and number.value is not None:
            if number.relation is not None:
                self._guard(Guard(*number.relation))
            else:
                self._specialise(number, "a branch")
            return bool(number.value)
        if value.numel() != 1:
            raise CompileError(f"{self.name}.step asks for the truth of a tensor of shape {tuple(value.shape)}.")
        if not self.decisions:
            raise _Branch(value.reshape(()) if value.dtype == torch.bool else value.reshape(()) != 0)
        return self.decisions.pop(0)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            return self._attribute(func, name, args)
        if name == "__bool__":
            return self._truth(args[0])
        if name in ("__float__", "__int__", "__index__", "__complex__", "tolist"):
            value = self._specialise(self._lookup(args[0]) or _Number(args[0], None, frozenset()), f"{name.strip('_')}()")
            return {"__int__": int, "__index__": int}.get(name, float)(value)
        if name == "item":
            known = self._lookup(args[0])
            return args[0] if known else self.number(args[0].to(torch.float64, copy=True))
        if name.startswith("_foreach_"):
            return self._each(name.removeprefix("_foreach_"), args, kwargs)
        if name in _METADATA:
            return func(*args, **kwargs)
        if name in _AUGMENTED and self._lookup(args[0]):  # Python numbers are rebound, never written
            return self._call(getattr(Tensor, _AUGMENTED[name]), _AUGMENTED[name], args, kwargs)
        return self._call(func, name, args, kwargs)

    def _attribute(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        held = self.grads.get(id(args[0]))
        if name == "__get__" and func == _ATTRIBUTES.grad.__get__ and held is not None:
            return held[1]
        if name == "__get__" and func == _ATTRIBUTES.data.__get__:
            return args[0]
        if name == "__set__" and func == _ATTRIBUTES.data.__set__:
            return args[0].copy_(args[1])
        return func(*args)

    def _each(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """A `_foreach_` function, one tensor at a time."""
        single = getattr(Tensor, name, None) or getattr(torch, name)
        length = next(len(a) for a in args if isinstance(a, list | tuple))
        if name.rstrip("_") in ("addcmul", "addcdiv") and len(args) > 3:
            args, kwargs = args[:-1], {**kwargs, "value": args[-1]}

        def pick(value: Any, i: int) -> Any:
            return value[i] if isinstance(value, list | tuple) and len(value) == length else value

        return [
            self.__torch_function__(single, (), tuple(pick(a, i) for a in args), {k: pick(v, i) for k, v in kwargs.items()})
            for i in range(length)
        ]

    def _call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.pop("out", None)
        if isinstance(out, Tensor):
            return out.copy_(self._call(func, name, args, kwargs))
        flat = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        writes = name.endswith("_") and not name.startswith("_") or name in _AUGMENTED
        if flat and not writes and all(id(a) in self.known or id(a) in self.scalar_state for a in flat):
            return self._arithmetic(func, name, args, kwargs)
        numbers = [self.known[id(a)] for a in flat if id(a) in self.known]
        if not numbers and name not in ("tensor", "as_tensor", "scalar_tensor", "__setitem__"):
            return self._plain(func, name, args, kwargs)
        real = [a for a in flat if id(a) not in self.known]
        if real and max(a.dim() for a in real) == 0:  # among 0-dim tensors torch promotes, with Python numbers it does not
            args, kwargs = self._cast(args, real[0].dtype), {k: self._cast((v,), real[0].dtype)[0] for k, v in kwargs.items()}
        rewrite = _REWRITES.get(name.rstrip("_") if writes else name)
        if rewrite is not None:
            result = rewrite(*args, **kwargs)
            if result is not None:
                return args[0].copy_(result) if writes else result
        try:
            return self._plain(func, name, args, kwargs)
        except DataDependentOutputException:  # the call wants a Python number
            plain = [self._specialise(n, f"{name}()") if (n := self._lookup(a)) else a for a in args]
            return func(*plain, **{k: self._specialise(n, f"{name}()") if (n := self._lookup(v)) else v for k, v in kwargs.items()})

    def _plain(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name.endswith("_") and name.rstrip("_") in _COMPOSITE:
            return args[0].copy_(getattr(args[0], name.rstrip("_"))(*args[1:], **kwargs))
        return func(*args, **kwargs)

    def _cast(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if self._lookup(a) and a.dtype != torch.bool else a for a in args)

    def _arithmetic(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation among numbers gives a number: Python's, in float64, whatever dtype a step count is stored in."""
        known = [self._lookup(a) for a in args]
        wide = tuple(a.to(torch.float64) if id(a) in self.scalar_state else a for a in args)
        if name in ("tensor", "as_tensor"):
            return wide[0].to(kwargs.get("dtype") or torch.get_default_dtype(), copy=True)
        result = func(*wide, **kwargs)
        if not isinstance(result, Tensor) or result.dim() != 0:
            return result
        self.number(result, self._value(name, args, kwargs), frozenset().union(*(k.names for k in known if k is not None)))
        left = known[0]
        if name in _COMPARISONS and left is not None and left.is_input and len(args) == 2 and known[1] is None:
            self.known[id(result)].relation = (next(iter(left.names)), _COMPARISONS[name], float(args[1]))
        return result

    def _value(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | bool | None:
        """What Python would compute, if everything in it depends on the group's numbers only."""
        plain: list[Any] = []
        for arg in args:
            number = self._lookup(arg)
            if isinstance(arg, Tensor) and (number is None or number.value is None):
                return None
            plain.append(arg if number is None else number.value)
        return _PYTHON[name](*plain) if name in _PYTHON and not kwargs else None


def _computed(tensor: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype in which torch's kernels compute: half precision is rounded once, at the end."""
    dtype = tensor.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype) if other.dim() or not tensor.dim() else dtype
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _scaled(tensor: Any, other: Any, alpha: Any = 1, *, sign: int = 1) -> Any:
    if not isinstance(alpha, Tensor):
        return None
    factor = alpha if sign > 0 else -alpha
    if not isinstance(other, Tensor):
        return tensor + other * factor
    dtype = _computed(tensor, other)
    return (tensor.to(dtype) + other.to(dtype) * factor).to(torch.result_type(tensor, other))


def _with_value(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def rewrite(tensor: Any, first: Any, second: Any, *, value: Any = 1) -> Any:
        if not isinstance(value, Tensor):
            return None
        dtype = _computed(tensor, first, second)
        return (tensor.to(dtype) + combine(first.to(dtype), second.to(dtype)) * value).to(tensor.dtype)

    return rewrite


def _clamp(tensor: Any, min: Any = None, max: Any = None) -> Any:
    for bound, limit in ((min, torch.maximum), (max, torch.minimum)):
        if bound is not None:
            tensor = limit(tensor, bound.to(tensor.dtype) if isinstance(bound, Tensor) else torch.full((), bound, dtype=tensor.dtype))
    return tensor


def _set_where(tensor: Any, mask: Any, value: Any) -> Any:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != tensor.shape:
        return None
    if isinstance(value, Tensor) and value.dim() != 0:
        return None
    return tensor.copy_(torch.where(mask, value, tensor))


def _make_scalar(value: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Any:
    if isinstance(value, Tensor) or not isinstance(value, int | float):
        return None
    inferred = torch.get_default_dtype() if isinstance(value, float) else torch.bool if isinstance(value, bool) else torch.int64
    return torch.full((), value, dtype=dtype or inferred)


# Calls that take a scalar, as arithmetic on tensors; None leaves the call as it is. In-place forms are derived from these.
_REWRITES: dict[str, Callable[..., Any]] = {
    "add": _scaled,
    "sub": lambda tensor, other, alpha=1: _scaled(tensor, other, alpha, sign=-1),
    "addcmul": _with_value(operator.mul),
    "addcdiv": _with_value(operator.truediv),
    "lerp": lambda tensor, end, weight: torch.lerp(tensor, end, weight.to(tensor.dtype)) if isinstance(weight, Tensor) else None,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda tensor, min: _clamp(tensor, min=min),
    "clamp_max": lambda tensor, max: _clamp(tensor, max=max),
    "fill": lambda tensor, value: torch.zeros_like(tensor) + value,
    "full_like": lambda tensor, value, **kwargs: torch.zeros_like(tensor, **kwargs) + value,
    "__setitem__": _set_where,
    "tensor": _make_scalar,
    "as_tensor": _make_scalar,
    "scalar_tensor": _make_scalar,
}
# In-place methods that functionalization does not know, because they are compositions of others.
_COMPOSITE = ("square", "divide", "true_divide", "multiply", "subtract", "negative", "absolute", "clip", "fix", "float_power")


def _placeholders(optimizer: torch.optim.Optimizer, index: int, slots: Sequence[Slot]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = _group_numbers(optimizer, optimizer.param_groups[index])
    state = tuple(f"state:{slot.name}" for slot in slots)
    return ("param", "grad", *state, *(f"number:{name}" for name in names)), ("param", *state)


def _trace(
    optimizer: torch.optim.Optimizer, index: int, shape: tuple[int, ...], dtype: torch.dtype, slots: Sequence[Slot]
) -> tuple[TracedUpdate, list[Guard]]:
    inputs, outputs = _placeholders(optimizer, index, slots)
    guards: list[Guard] = []
    raw = _group_numbers(optimizer, optimizer.param_groups[index])
    present = {name: value.item() if isinstance(value, Tensor) else value for name, value in raw.items()}

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(inputs, tensors, strict=True))

        def explore(decisions: tuple[bool, ...]) -> dict[str, Tensor]:
            if len(decisions) > _MAX_BRANCHES:
                raise CompileError(
                    f"{type(optimizer).__qualname__}.step branches more than {_MAX_BRANCHES} times on values that change from step "
                    "to step. Use torch.where, torch.maximum, torch.clamp instead of if, max, min."
                )
            try:
                return _one_path(optimizer, index, given, slots, present, decisions, guards)
            except _Branch as branch:
                condition = branch.condition
            then, otherwise = explore((*decisions, True)), explore((*decisions, False))
            return {name: torch.where(condition, then[name], otherwise[name]) for name in outputs}

        results = explore(())
        return tuple(results[name] for name in outputs)

    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)]
        fakes += [torch.empty(slot.size, dtype=slot.dtype) for slot in slots]
        fakes += [torch.empty((), dtype=torch.float64) for _ in present]
        try:
            traced = make_fx(torch.func.functionalize(function, remove="mutations"))(*fakes)
        except MeshcError:
            raise
        except Exception as error:
            raise CompileError(
                f"{type(optimizer).__qualname__}.step could not be traced for a parameter of shape {shape}: {error}. It must be made "
                "of torch operations on parameters, gradients and state, with step counts in the state."
            ) from error
    return TracedUpdate(_simplify(traced, type(optimizer).__qualname__, inputs), inputs, outputs), guards


def _one_path(
    optimizer: torch.optim.Optimizer,
    index: int,
    given: Mapping[str, Tensor],
    slots: Sequence[Slot],
    present: Mapping[str, float],
    decisions: Sequence[bool],
    guards: list[Guard],
) -> dict[str, Tensor]:
    """Run `step` once on copies of `given`, taking `decisions` at its branches; raises _Branch at the first that is not decided."""
    name = type(optimizer).__qualname__
    param = given["param"].clone()
    hyper = {number: given[f"number:{number}"] for number in present}
    state: dict[str, Any] = {}
    mode = _NumbersAsTensors(name, decisions)
    mode.grads[id(param)] = (param, given["grad"].clone())
    mode.guards = guards
    for number, tensor in hyper.items():
        mode.number(tensor, present[number], frozenset([number]))
        mode.known[id(tensor)].is_input = True
    created: dict[str, Any] | None = None
    started = True
    if any(slot.name == FIRST for slot in slots):
        first = given[f"state:{FIRST}"] != 0
        with mode:
            if _is_torchs_own(optimizer):
                created = _created(optimizer, index, param, hyper)
            else:
                started = not bool(first)
    for slot in slots:
        if slot.hidden or not started:
            continue
        tensor = given[f"state:{slot.name}"].clone()
        if created is not None and slot.from_first_step:
            tensor = torch.where(first, created[slot.name], tensor)
        state[slot.name] = tensor
        if slot.python:
            mode.number(tensor)
        elif slot.shape == "scalar":
            mode.scalar_state[id(tensor)] = tensor
    twin = _private(optimizer, index, param, hyper, defaultdict(dict, {param: state}))
    watched = _snapshot(twin)
    with mode:
        _unhooked(type(twin).step)(twin)
    after = _snapshot(twin)
    changed = sorted(k for k in {*watched, *after} if watched.get(k) != after.get(k))
    if changed:
        raise CompileError(
            f"{name}.step changes {', '.join(changed)}, which is not state of a parameter and would be compiled in as a constant. "
            "Keep step counts and averages in optimizer.state[parameter]."
        )
    results = {"param": param}
    final = twin.state[param]
    for slot in slots:
        if slot.name == FIRST:
            results[f"state:{FIRST}"] = torch.zeros_like(given[f"state:{FIRST}"])
            continue
        value = final.pop(slot.name)
        value = value if isinstance(value, Tensor) else torch.full((), value, dtype=slot.dtype)
        results[f"state:{slot.name}"] = value if value.dtype == slot.dtype else value.to(slot.dtype)
    if final:
        raise CompileError(f"{name}.step creates state {', '.join(map(repr, final))} after its first step; create all state in the first.")
    return results


def _created(optimizer: torch.optim.Optimizer, index: int, param: Tensor, hyper: Mapping[str, Tensor]) -> dict[str, Any]:
    twin = _private(optimizer, index, param, hyper, defaultdict(dict))
    _create_state(twin)
    return twin.state[param]


def _snapshot(twin: Any) -> dict[str, Hashable]:
    """Everything outside the parameter's state, so that what a step changes there can be named."""
    skipped = ("state", "param_groups", "_warned_capturable_if_run_uncaptured")
    seen = {f"self.{k}": v for k, v in vars(twin).items() if k not in skipped}
    seen |= {f"group[{k!r}]": v for k, v in twin.param_groups[0].items() if k != "params"}
    seen |= {f"state[{k!r}]": v for k, v in twin.state.items() if not isinstance(k, Tensor)}
    return {k: _token(v) for k, v in seen.items()}


def _token(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((repr(k), _token(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(_token(v) for v in value)
    return repr(value) if isinstance(value, int | float | str | set | None) else id(value)


# Tidying a traced graph.


def _simplify(traced: GraphModule, name: str, inputs: Sequence[str]) -> GraphModule:
    """Drop copies, merge equal nodes, move `where` from the results of two branches to what differs in them; placeholders get names."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.op == "get_attr" and node.users:
            raise CompileError(
                f"{name}.step uses a tensor that is not its parameter's, its gradient's or its state's. Keep it in "
                "optimizer.state[parameter]."
            )
        if node.op == "call_function" and node.target in _COPIES:
            source = node.args[_COPIES[node.target]]
            here, there = node.meta["val"], source.meta["val"]
            if (here.shape, here.dtype) == (there.shape, there.dtype):
                node.replace_all_uses_with(source)
    _merge_equal(graph)
    sunk: dict[tuple[Node, Node, Node], Node] = {}
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.where.self:
            condition, then, otherwise = node.args
            both = isinstance(then, Node) and isinstance(otherwise, Node)
            merged = _sink(graph, node, condition, then, otherwise, sunk) if both else None
            if merged is not None:
                node.replace_all_uses_with(merged)
    _merge_equal(graph)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            graph.erase_node(node)
    named = Graph()
    copies: dict[Node, Node] = {}
    remaining = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            copies[node] = named.placeholder(re.sub(r"\W", "_", next(remaining)))
            copies[node].meta.update(node.meta)
        else:
            copies[node] = named.node_copy(node, copies.__getitem__)
    return GraphModule(torch.nn.Module(), named, f"{name}Update")


# Operators that return one of their arguments (its position) where neither shape nor dtype changes: nothing is written in a traced graph.
_COPIES = {
    torch.ops.aten.clone.default: 0,
    torch.ops.aten.detach.default: 0,
    torch.ops.aten.view.default: 0,
    torch.ops.aten._to_copy.default: 0,
    torch.ops.aten.copy.default: 1,
}


def _merge_equal(graph: Graph) -> None:
    seen: dict[Hashable, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            continue
        # repr keeps 1, 1.0 and True apart, which compare equal
        signature = (node.target, repr((node.args, node.kwargs)))
        if signature in seen:
            node.replace_all_uses_with(seen[signature])
        else:
            seen[signature] = node


def _sink(graph: Graph, at: Node, condition: Node, then: Node, otherwise: Node, sunk: dict[tuple[Node, Node, Node], Node]) -> Node | None:
    """`where(c, f(x), f(y))` as `f(where(c, x, y))`; None where the two are not the same operation on values of equal type."""
    if then is otherwise:
        return then
    if (condition, then, otherwise) in sunk:
        return sunk[condition, then, otherwise]
    same = then.op == otherwise.op == "call_function" and then.target is otherwise.target and len(then.args) == len(otherwise.args)
    if not same or repr(then.kwargs) != repr(otherwise.kwargs) or torch.Tag.nondeterministic_seeded in getattr(then.target, "tags", ()):
        return None
    differ = [i for i, (a, b) in enumerate(zip(then.args, otherwise.args, strict=True)) if a is not b and repr(a) != repr(b)]
    if len(differ) != 1:
        return None
    (position,) = differ
    a, b = then.args[position], otherwise.args[position]
    if not all(isinstance(v, Node | float | int) and not isinstance(v, bool) for v in (a, b)):
        return None
    value = _choose(graph, at, condition, a, b, sunk)
    if value is None:
        return None
    with graph.inserting_before(at):
        args = (*then.args[:position], value, *then.args[position + 1 :])
        node = graph.create_node("call_function", then.target, args, dict(then.kwargs))
    node.meta.update(then.meta)
    sunk[condition, then, otherwise] = node
    return node


def _choose(graph: Graph, at: Node, condition: Node, a: Any, b: Any, sunk: dict[tuple[Node, Node, Node], Node]) -> Node | None:
    if isinstance(a, Node) and isinstance(b, Node):
        if a.meta["val"].shape != b.meta["val"].shape or a.meta["val"].dtype != b.meta["val"].dtype:
            return None
        deeper = _sink(graph, at, condition, a, b, sunk)
        if deeper is not None:
            return deeper
        op = torch.ops.aten.where.self
    elif isinstance(a, Node) and a.meta["val"].dim() == 0 and a.meta["val"].dtype == torch.float64:
        op = torch.ops.aten.where.ScalarOther
    elif isinstance(b, Node) and b.meta["val"].dim() == 0 and b.meta["val"].dtype == torch.float64:
        op = torch.ops.aten.where.ScalarSelf
    else:
        return None
    with graph.inserting_before(at):
        node = graph.call_function(op, (condition, a, b))
    node.meta["val"] = (a if isinstance(a, Node) else b).meta["val"]
    return node


# A user's own class, against its own trace.


def _check_against_itself(optimizer: torch.optim.Optimizer, index: int) -> None:
    """Three steps of two small parameters together, eager and traced.

    Finds what a trace of one parameter cannot show: an update that couples parameters, or that keeps a count where tracing did not look.
    """
    group = optimizer.param_groups[index]
    generator = torch.Generator().manual_seed(0)
    ranks = sorted({p.dim() for p in group["params"]})
    shapes = [tuple(min(size, 3 + i) for i, size in enumerate(next(p for p in group["params"] if p.dim() == rank).shape)) for rank in ranks]
    shapes = [shape for shape in (shapes * 2)[: max(2, len(shapes))] if math.prod(shape)]
    if not shapes:
        return

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    eager = [torch.nn.Parameter(draw(shape)) for shape in shapes]
    twin = _private(optimizer, index, eager[0], {}, defaultdict(dict))
    twin.param_groups[0]["params"] = eager
    given = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers(optimizer)[index].items()}
    mine = [p.detach().clone() for p in eager]
    slots = [_fresh_slots(optimizer, index, shape, torch.float64) for shape in shapes]
    traces = {shape: _trace(optimizer, index, shape, torch.float64, s)[0] for shape, s in zip(shapes, slots, strict=True)}
    by_signature = {(shape, torch.float64): trace for shape, trace in traces.items()}
    spec = GroupSpec(index, "other", type(optimizer).__qualname__, (), tuple(given), (), (), (), by_signature)
    states = [{slot.name: slot.initial(p) for slot in s} for s, p in zip(slots, mine, strict=True)]
    start = [p.clone() for p in mine]
    for _ in range(3):
        for i, p in enumerate(eager):
            p.grad = draw(shapes[i])
            mine[i], states[i] = update_nodes(spec, mine[i], p.grad.clone(), states[i], given, lambda op, *a, **k: op(*a, **k))
        with torch.no_grad():
            _unhooked(type(twin).step)(twin)
    for p, q, before in zip(eager, mine, start, strict=True):
        moved = (p.detach() - before).abs().max().item()
        wrong = (p.detach() - q).abs().max().item()
        if not wrong <= 1e-5 * moved:
            raise CompileError(
                f"{type(optimizer).__qualname__}: after three steps on small tensors its traced update differs by {wrong:.3g} where the "
                f"parameter moved by {moved:.3g}. A step that couples parameters, draws random numbers or counts outside "
                "optimizer.state cannot be compiled; use Adam, AdamW, SGD or an elementwise update."
            )
