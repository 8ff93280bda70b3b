"""Specification of an optimizer for a program: groups, state slots per parameter, numbers read at each call.

Adam, AdamW and SGD have fixed lists of numbers and flags; of every other class a group's entries are sorted by type: numbers, also in
tuples, are read at each call, all else is compiled in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Final, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.optim import Optimizer

from meshc.errors import StateError
from meshc.ir.formats import ROLES, Role
from meshc.ir.functions import Function
from meshc.ops.block_codes import BLOCK, code_of, scale_shape
from meshc.optimizer.optimizer_set import AnyOptimizer, Optimizers, members_of
from meshc.optimizer.registered_updates import UPDATES

Key: TypeAlias = tuple[tuple[str, Hashable], ...]

HIDDEN = "meshc."
"""Prefix of state slots that a program keeps and `optimizer.state` does not know."""

FIRST = HIDDEN + "first"
"""1.0 until the parameter's first update, then 0.0, for optimizers whose first step differs."""

MASTER = HIDDEN + "master"
"""The float32 parameter of which a 16-bit one is the rounding."""

GRADIENT = HIDDEN + "gradient"
"""The gradient that a parameter was last updated with."""

SUM = HIDDEN + "sum"
"""Gradient accumulated over the calls that do not step."""

PART_ERRORS = HIDDEN + "part_errors"
"""What rounding the gradient of each part of the batch has left, [parts, ...], where the plan compresses gradients."""

SUM_ERROR = HIDDEN + "sum_error"
"""What rounding the sum of these gradients has left."""

NON_FINITE = HIDDEN + "non_finite"
"""Above 0 if the gradient of the last step had an infinity or a NaN, where the loss is scaled."""

MASK = HIDDEN + "mask"
"""Which entries of the parameter products read, where the plan makes this anew every so many steps."""

MASK_STEPS = HIDDEN + "mask_steps"
"""The number of steps that have been done with such masks."""

PEAKS: Final[Mapping[Role, str]] = {role: f"{HIDDEN}{role}_peaks" for role in ROLES}
"""The largest magnitudes of an operand of the parameter's product in the steps before, the last one first, where scales are delayed."""

KEPT: Final = ("bf16", "8bit")
"""Formats in fewer bits in which optimizer state may be stored."""

CODES, SCALE = ".codes", ".scale"
"""Suffixes of the names under which 8-bit state is stored (`meshc/ops/block_codes.py`)."""

SQUARES: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf")
"""State of torch's own optimizers that is never negative: Adam's second moment, RMSprop's, Adadelta's two, Adagrad's sum, Adamax's norm."""

_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "initial_momentum", "base_momentum", "max_momentum")  # entries that schedulers add
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")  # how torch computes, not what
ADAM_NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay")

HALVES: Final = (torch.bfloat16, torch.float16)

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "!=": operator.ne, "==": operator.eq, ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le,
}  # fmt: skip


@dataclass(frozen=True)
class Training:
    """What only a `meshc.TrainStep` can have, of what its updates leave.

    optimizer_state  in what the optimizer's state is kept between steps: "bf16", or "8bit", a byte an element and a float32 scale for each
                     256 of a row; rounded up or down by a draw that is the same on every mesh; default: as the optimizer has it
    master_weights   True: of parameters in 16 bits a float32 copy is kept beside the optimizer's state, and updated; the parameter is its
                     rounding
    keep_gradients   after each call `parameter.grad` is the gradient that the parameter was updated with, behind hooks and clipping, as a
                     DTensor that is sharded as the optimizer's state is; it costs a rank their bytes
    accumulate       `program.accumulate(...)` may add up gradients over several calls; it costs a rank their bytes
    """

    optimizer_state: str | None = None
    master_weights: bool = False
    keep_gradients: bool = False
    accumulate: bool = False

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which the update of a parameter of `dtype` computes."""
        return torch.float32 if (self.optimizer_state or self.master_weights) and dtype in HALVES else dtype

    def stored_slots(self, slots: Sequence[Slot], size: tuple[int, ...], dtype: torch.dtype) -> tuple[Slot, ...]:
        """The slots of a parameter of this size and dtype as the program stores them."""
        found = [one for slot in slots for one in slot.stored_as(self.optimizer_state)]
        if self.master_weights and dtype in HALVES:
            found.append(Slot(MASTER, "like_param", size, torch.float32, None))
        names = [name for name, wanted in ((GRADIENT, self.keep_gradients), (SUM, self.accumulate)) if wanted and not dtype.is_complex]
        found += [Slot(name, "like_param", size, dtype, 0.0) for name in names]
        return tuple(found)


AS_IT_IS: Final = Training()
"""State is stored as the optimizer has it."""


@dataclass(frozen=True)
class Slot:
    """One state tensor of one parameter.

    `shape` is "like_param", "scalar" or "other" (then `size` is not derived from the parameter's). A fresh slot is filled with `fill`, or
    is a copy of the parameter where `fill` is None. `value` is the optimizer's own tensor when it has stepped or loaded a state dict.
    `python`: the optimizer keeps a Python number there; a program holds a 0-dim float64 tensor, and so does `optimizer.state` from then on.
    `from_first_step`: torch derives the initial value from the first step's gradient or numbers, and so does the program.
    `computed`: the dtype in which the update reads and returns a slot that is stored in fewer bits. `signed`: whether values may be
    negative; otherwise 8-bit codes have one bit more for magnitudes.
    """

    name: str
    shape: str
    size: tuple[int, ...]
    dtype: torch.dtype
    fill: float | None
    python: bool = False
    from_first_step: bool = False
    value: Tensor | None = field(default=None, compare=False)
    computed: torch.dtype | None = None
    signed: bool = True

    @property
    def wide(self) -> bool:
        """Whether the slot has one floating-point number of more than 16 bits per element of the parameter."""
        return self.shape == "like_param" and self.size != () and self.dtype in (torch.float32, torch.float64)

    @property
    def wide_or_narrow(self) -> bool:
        """Whether the slot is wide, or a wide slot stored in 16 bits."""
        return self.wide or (self.computed is not None and not self.part)

    def stored_as(self, state: str | None) -> tuple[Slot, ...]:
        """Slots as stored with `Training.optimizer_state`: if it is wide, itself in bfloat16, or its codes and scales where a row fills a
        block and it is no copy of the parameter; else itself."""
        if state == "bf16" and self.wide:
            return (replace(self, dtype=torch.bfloat16, computed=self.dtype),)
        if state != "8bit" or not self.wide or self.size[-1] < BLOCK or self.fill is None:
            return (self,)
        codes = replace(self, name=self.name + CODES, dtype=torch.uint8, computed=self.dtype, fill=float(code_of(self.fill, self.signed)))
        size = scale_shape(self.size)
        return codes, replace(
            self, name=self.name + SCALE, shape="other", size=size, dtype=torch.float32, computed=self.dtype, fill=abs(self.fill)
        )

    @property
    def plain(self) -> str:
        """The optimizer's own name for this state."""
        return self.name.removesuffix(CODES).removesuffix(SCALE) if self.part else self.name

    @property
    def part(self) -> str:
        """`CODES` or `SCALE` for a slot of 8-bit state, else ""."""
        parted = self.computed is not None and self.dtype != torch.bfloat16
        return "" if not parted else CODES if self.dtype == torch.uint8 else SCALE

    @property
    def is_hidden(self) -> bool:
        return self.name.startswith(HIDDEN)

    def initial(self, param: Tensor) -> Tensor:
        """A new tensor with the value before the next step; scalars are on the CPU, others on the parameter's device."""
        if self.value is not None:
            return self.value.detach().to(self.dtype, copy=True)
        if self.fill is None:
            return param.detach().to(self.dtype, copy=True)
        if self.shape == "like_param":
            return torch.full_like(param, self.fill, dtype=self.dtype, memory_format=torch.preserve_format, requires_grad=False)
        return torch.full(self.size, self.fill, dtype=self.dtype, device="cpu" if self.shape == "scalar" else param.device)


@dataclass(frozen=True)
class NumberGuard:
    """Assumption of a program on one number: `number <relation> constant` has this outcome, or (relation "is") the number this value."""

    number: str
    relation: str
    constant: float = 0.0

    def outcome(self, numbers: Mapping[str, float]) -> float | bool:
        value = numbers[self.number]
        return value if self.relation == "is" else bool(RELATIONS[self.relation](value, self.constant))


@dataclass(frozen=True)
class TracedUpdate:
    """One parameter's update as a graph of aten operators on global shapes.

    Placeholders are, in order, `inputs`: "param", "grad", "state:NAME", "number:NAME"; results, in order, `outputs`: "param", "state:NAME".
    Numbers and scalar state are 0-dim and on the same device as the rest.
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
    guards: tuple[NumberGuard, ...]
    params: tuple[Tensor, ...]
    slots: tuple[tuple[Slot, ...], ...]
    traced: Mapping[tuple[tuple[int, ...], torch.dtype], TracedUpdate] = field(default_factory=dict)
    keeping: Training = AS_IT_IS

    def flag(self, name: str) -> Hashable:
        return dict(self.flags)[name]

    def slots_of(self, param: Tensor) -> tuple[Slot, ...]:
        return next(slots for p, slots in zip(self.params, self.slots, strict=True) if p is param)


@dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """Result of `describe`. `key` is hashable; a program is valid as long as `key_of(optimizer)` equals it.

    `groups` are those of all optimizers that step; `idle` are parameters that an optimizer holds and none steps, with the holder's name.
    """

    optimizer: str
    groups: tuple[GroupSpec, ...]
    key: Key
    idle: tuple[tuple[Tensor, str], ...] = ()
    _seen: list[tuple[list[int], list[object], Key]] = field(default_factory=list, init=False)
    """Of the latest groups whose entries cannot change in place: counts, entries, key."""

    def group_of(self, param: Tensor) -> GroupSpec:
        for group in self.groups:
            if any(p is param for p in group.params):
                return group
        raise StateError(f"{self.optimizer}: a parameter of shape {tuple(param.shape)} is in none of its {len(self.groups)} groups")

    def slots_of(self, param: Tensor) -> tuple[Slot, ...]:
        return self.group_of(param).slots_of(param)

    def of_live(self, live: Callable[[Tensor], Tensor]) -> OptimizerSpec:
        """This specification for the live parameters, `live(old)`; neither the old parameters nor their state is referenced any more."""
        groups = [
            replace(
                group,
                params=tuple(live(param) for param in group.params),
                slots=tuple(tuple(replace(slot, value=None) for slot in slots) for slots in group.slots),
            )
            for group in self.groups
        ]
        return replace(self, groups=tuple(groups), idle=tuple((live(param), who) for param, who in self.idle))

    def key_of(self, optimizer: AnyOptimizer) -> Key:
        """The key now: the one returned before if groups hold the same entries, none of which changes in place."""
        members, groups = members_of(optimizer), optimizer.param_groups
        counts = [len(UPDATES), *(len(group["params"]) for group in groups)]
        entries = [*map(type, members), *chain.from_iterable(groups), *chain.from_iterable(map(dict.values, groups))]
        for known, then, key in self._seen:
            if known == counts and len(then) == len(entries) and all(map(operator.is_, then, entries)):
                return key
        key = guarded_key(optimizer, [group.guards for group in self.groups])
        fixed = all(_is_fixed(value) for group in groups for name, value in group.items() if name not in ("params", "param_names"))
        self._seen[:] = [(counts, entries, key)] if fixed else []
        return key


# What torch's optimizers hold in a group.


def token(value: object) -> Hashable:
    """A hashable stand-in for `value`: equal for equal plain values, also in lists and dicts; for all else the identity."""
    if isinstance(value, dict):
        return tuple((repr(k), token(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(token(v) for v in value)
    return repr(value) if isinstance(value, int | float | str | set | None) else id(value)


def attributes(owner: object, path: str) -> dict[str, Hashable]:
    """Tokens of an object's attributes by their paths, without the groups and the state of an optimizer."""
    skipped = ("state", "param_groups", "_warned_capturable_if_run_uncaptured")
    return {f"{path}.{name}": token(value) for name, value in vars(owner).items() if name not in skipped}


def changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


def without_hooks(function: Function) -> Function:
    """A `step` without torch's hooks: `Optimizer.__init__` wraps that of each class once."""
    return getattr(function, "__wrapped__", function) if getattr(function, "hooked", False) else function


def _original_function(function: Function) -> Function:
    """A method without decorators, for comparison: the first `torch.compile` wraps the methods of each optimizer class anew."""
    while True:
        inner = getattr(function, "_torchdynamo_orig_callable", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            return function
        function = inner


def _follows(optimizer: Optimizer, base: type[Optimizer]) -> bool:
    kind: Any = type(optimizer)
    own: Any = base
    return isinstance(optimizer, base) and _are_equal(kind.step, own.step) and _are_equal(kind._init_group, own._init_group)


@lru_cache
def _are_equal(one: Function, other: Function) -> bool:
    return _original_function(one) is _original_function(other)


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the class is torch's own, which creates state in `_init_group`, before a step; tests check the traces of these."""
    return type(optimizer).__module__.startswith("torch.optim.") and hasattr(optimizer, "_init_group")


def kind_of(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    if type(optimizer) in UPDATES:
        return "other"
    if _follows(optimizer, torch.optim.Adam):
        return "adamw" if group.get("decoupled_weight_decay") else "adam"
    return "sgd" if _follows(optimizer, torch.optim.SGD) else "other"


def _is_fixed(value: object) -> bool:
    """Whether a value is plain, and no one can change it in place."""
    return isinstance(value, bool | int | float | str | None) or (isinstance(value, tuple) and all(map(_is_fixed, value)))


def _is_number(value: object) -> TypeGuard[float | Tensor]:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool)


def _entries(group: Mapping[str, Any]) -> tuple[dict[str, float | Tensor], dict[str, object]]:
    """(numbers, flags) of a group without a `meshc::` update: numbers, also in tuples, are read at each call, all else is compiled in."""
    numbers: dict[str, float | Tensor] = {}
    flags: dict[str, object] = {}
    for name, value in group.items():
        if name in ("params", "param_names", *_SCHEDULERS, *IMPLEMENTATION):
            continue
        if _is_number(value):
            numbers[name] = value
        elif isinstance(value, tuple | list) and any(_is_number(v) for v in value):
            for i, v in enumerate(value):
                if _is_number(v):
                    numbers[f"{name}_{i}"] = v
                else:
                    flags[f"{name}_{i}"] = v
        else:
            flags[name] = value
    return numbers, flags


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def group_numbers(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
    kind = kind_of(optimizer, group)
    if kind in ("adam", "adamw"):
        beta1, beta2 = group["betas"]
        return dict(zip(ADAM_NUMBERS, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"]), strict=True))
    if kind == "sgd":
        return {name: group[name] for name in SGD_NUMBERS}
    return _entries(group)[0]


def group_flags(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[tuple[str, Hashable], ...]:
    kind = kind_of(optimizer, group)
    if kind in ("adam", "adamw"):
        flags: dict[str, object] = {"amsgrad": bool(group["amsgrad"]), "maximize": bool(group["maximize"]), "decoupled": kind == "adamw"}
    elif kind == "sgd":
        flags = {name: bool(group[name]) for name in ("nesterov", "maximize", "momentum")}
    else:
        flags = _entries(group)[1]
    return tuple((name, _hashable(value)) for name, value in flags.items())


def numbers(optimizer: AnyOptimizer) -> list[dict[str, float]]:
    """Present numbers of each group, in the group's order; tensors are read."""
    return [
        {name: float(value.item() if isinstance(value, Tensor) else value) for name, value in group_numbers(member, group).items()}
        for member in members_of(optimizer)
        for group in member.param_groups
    ]


def rates(optimizer: AnyOptimizer) -> list[float | None]:
    """The learning rate of each group; None where the class computes its own."""
    found = [group.get("lr") for member in members_of(optimizer) for group in member.param_groups]
    return [None if rate is None else float(rate) for rate in found]


def guarded_key(optimizer: AnyOptimizer, guards: Sequence[Sequence[NumberGuard]]) -> Key:
    members = members_of(optimizer)
    rows = [(member, group) for member in members for group in member.param_groups]
    entries: list[tuple[str, Hashable]] = [("optimizer", str(Optimizers(members))), ("number of groups", len(rows))]
    values = numbers(optimizer)
    for i, ((member, group), now) in enumerate(zip(rows, values, strict=True)):
        where = f"group {i}: " if len(members) == 1 else f"group {i} ({type(member).__qualname__}): "
        entries.append((where + "number of parameters", len(group["params"])))
        entries.append((where + "numbers", tuple(now)))
        entries += [(where + name, value) for name, value in group_flags(member, group)]
        for guard in guards[i] if i < len(guards) else ():
            if guard.number in now:
                name = guard.number if guard.relation == "is" else f"{guard.number} {guard.relation} {guard.constant:g}"
                entries.append((where + name, guard.outcome(now)))
    return tuple(entries)
