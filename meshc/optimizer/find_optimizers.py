"""Optimizers that a training step runs: one, those of a list, or those that a wrapper's `step` calls.

    TrainStep(model, optimizer=adamw)                 adamw
    TrainStep(model, optimizer=[muon, adamw])         muon and adamw
    TrainStep(model, optimizer=MuonWithAdamW(model))  what its step calls: self.muon and self.adamw

A compiled step runs no wrapper's `step`, which may therefore do nothing but call inner steps. To check that, the `step` is run once on a
copy of the wrapper with small samples of the parameters, whose inner steps only record their calls. Writes to samples, changed numbers
and attributes, and inner optimizers that are not called are detected and refused by name.
"""

from __future__ import annotations

import traceback
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshc.errors import CompileError, MeshcError, StateError
from meshc.frames import innermost
from meshc.ir import trees
from meshc.ir.schemas import written_operands
from meshc.optimizer.optimizer_set import Optimizers, parameters_of, refuse_shared
from meshc.optimizer.spec import attributes, changed_names, token, without_hooks
from meshc.private import OpOverload, TorchDispatchMode

_OWN: Final = ("state", "param_groups", "defaults", "step")
"""Attributes of an optimizer that are not searched for other optimizers; `step` is one once a scheduler has wrapped it."""
_CONTAINERS: Final = (list, tuple, set, dict, OrderedDict, defaultdict)

_BESIDE: Final = (
    "  a super().step() beside their steps is none of theirs: keep what it updates as an optimizer in an attribute, too\n"
    "  (self.rest = torch.optim.AdamW(...)), and call self.rest.step()\n"
)
NameOf = Callable[[Tensor], str]


def find_optimizers(given: object, name_of: NameOf) -> Optimizers:
    """The optimizers that stepping `given`, an optimizer, a wrapper or a list of both, steps. `name_of` names parameters in messages.

    Raises StateError for what is no optimizer, CompileError for a wrapper that does more than call its optimizers' steps.
    """
    ones = list(given) if isinstance(given, list | tuple) else [given]
    if given is None or not ones:
        raise StateError(
            f"TrainStep(optimizer={given!r}): a training step updates parameters, so it needs an optimizer\n"
            "  what to do: meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3));\n"
            "  for a loop of your own, with loss.backward() and optimizer.step(), compile the module itself:\n"
            "  meshc.compile(model, mesh, kwargs={...example inputs...}), and build the optimizer after it"
        )
    found = [_single_optimizer(one, name_of) for one in ones]
    members = tuple(member for one in found for member in one.members)
    refuse_shared(members, name_of)
    stepped = {*map(id, parameters_of(members))}
    idle = tuple((p, who) for one in found for p, who in one.idle if id(p) not in stepped)
    return Optimizers(members, tuple(wrapper for one in found for wrapper in one.wrappers), idle)


def inner_optimizers(owner: object) -> dict[str, Optimizer]:
    """Other optimizers in the attributes of `owner`, also in lists, dicts and wrappers there, by path: `.muon`, `.optimizers[0]`."""
    found: dict[str, Optimizer] = {}
    seen = {id(owner)}

    def look(value: object, path: str) -> None:
        for name, item in _entries(value):
            if id(item) in seen or not _is_searchable(item):
                continue
            seen.add(id(item))
            if isinstance(item, Optimizer):
                found[path + name] = item
            look(item, path + name)

    look(owner, "")
    return found


def _is_searchable(value: object) -> bool:
    if isinstance(value, Optimizer) or type(value) in _CONTAINERS:
        return True
    return not isinstance(value, Tensor | nn.Module | type) and hasattr(value, "__dict__") and callable(getattr(value, "step", None))


def _entries(value: object) -> Iterator[tuple[str, object]]:
    """(path, value) of the entries of a container or an object; lists of tensors and of plain values are not searched."""
    if isinstance(value, dict) and type(value) in _CONTAINERS:
        rows: list[tuple[str, object]] = [(f"[{key!r}]", item) for key, item in value.items()]
    elif type(value) in _CONTAINERS:
        rows = [(f"[{index}]", item) for index, item in enumerate(cast(Iterable[object], value))]
    else:
        own = _OWN if isinstance(value, Optimizer) else ()
        yield from [(f".{name}", item) for name, item in vars(value).items() if name not in own and not name.endswith("_hooks")]
        return
    if rows and not isinstance(rows[0][1], Tensor | int | float | str):
        yield from rows


def _single_optimizer(given: object, name_of: NameOf) -> Optimizers:
    is_optimizer = isinstance(given, Optimizer)
    inside = inner_optimizers(given) if hasattr(given, "__dict__") and not isinstance(given, type | Tensor | nn.Module) else {}
    if not is_optimizer and not (inside and callable(getattr(type(given), "step", None))):
        what = f"the class {given.__qualname__}: make one" if isinstance(given, type) else f"of type {type(given).__qualname__}"
        raise StateError(
            f"TrainStep(optimizer=...) is {what}, which is no optimizer and holds none\n"
            "  what to do: give a torch.optim.Optimizer, several of them in a list, or a wrapper that keeps them in its attributes"
        )
    if not inside:
        return Optimizers((cast(Optimizer, given),))
    return _WrapperTrial(cast(Wrapper, given), inside, name_of).outcome()


# A wrapper's step, tried on samples.


class Wrapper(Protocol):
    def step(self) -> object: ...


class _WrapperTrial:
    """One run of a wrapper's `step` on a copy that holds sample parameters."""

    def __init__(self, wrapper: Wrapper, inside: dict[str, Optimizer], name_of: NameOf) -> None:
        self.wrapper, self.inside, self.name_of = wrapper, inside, name_of
        self.name = type(wrapper).__qualname__
        self.optimizers = [one for one in (wrapper, *inside.values()) if isinstance(one, Optimizer)]
        self.nested = {id(one) for one in inside.values() if inner_optimizers(one)}
        self.called: list[Optimizer] = []
        self.parameters = {id(p): p for p in parameters_of(self.optimizers)}
        self.samples: dict[int, nn.Parameter] = {}
        self.gradients: dict[int, Tensor] = {}
        for index, (key, parameter) in enumerate(self.parameters.items()):
            self.samples[key], self.gradients[key] = _sample(parameter, index)
        self.copies: dict[int, object] = {}
        self.paths: list[tuple[str, object]] = []
        self.originals: list[object] = []  # held so that ids are not reused
        self.twin = self._copy(wrapper, "self")
        self.writes = _Writes(self)

    def outcome(self) -> Optimizers:
        before, real = self._snapshot(), self._numbers()
        try:
            with self.writes, torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                without_hooks(type(self.wrapper).step)(self.twin)
        except MeshcError:
            raise
        except Exception as error:
            raise CompileError(
                f"{self.name}.step could not be tried on samples of its parameters: {type(error).__name__}: {error}{_line(error)}\n"
                f"{self._advice()}"
            ) from error
        if not self.called:
            return self._steps_itself()
        faults = [*self.writes.found, *[f"it changes {key}" for key in changed_names(before, self._snapshot())]]
        if self._numbers() != real:
            faults.append("it changes numbers of its optimizers' groups")
        if faults:
            raise CompileError(
                f"{self.name}.step does more than call the steps of its optimizers: {'; '.join(faults[:6])}\n"
                f"  why: a compiled step runs {' and '.join(type(one).__qualname__ for one in self.called)}, never {self.name}.step, so "
                f"this would be left out\n{self._advice()}"
            )
        wrappers = [one for one in (self.wrapper, *self.inside.values()) if one is self.wrapper or id(one) in self.nested]
        return Optimizers(tuple(self.called), tuple(wrappers), self._idle(self.called))

    def _steps_itself(self) -> Optimizers:
        """Result where no inner step was called: an optimizer that only holds others is traced as any other."""
        if isinstance(self.wrapper, Optimizer):
            return Optimizers((self.wrapper,), (), self._idle([self.wrapper]))
        held = ", ".join(f"self{path}" for path in self.inside)
        raise CompileError(f"{self.name}.step calls the step of none of the optimizers that it holds ({held})\n{self._advice()}")

    def _idle(self, stepping: list[Optimizer]) -> tuple[tuple[Tensor, str], ...]:
        others = [one for one in self.optimizers if one not in stepping]
        return tuple((p, type(one).__qualname__) for one in others for p in parameters_of([one]))

    def _advice(self) -> str:
        bases = type(self.wrapper).__mro__[1:]
        derived = isinstance(self.wrapper, Optimizer) and any("step" in vars(one) for one in bases if one is not Optimizer)
        return (
            f"{_BESIDE if derived else ''}"
            "  what to do: give the optimizers themselves, TrainStep(model, optimizer=[first, second]), and do what else the step does\n"
            "  elsewhere: a rate in a torch.optim.lr_scheduler of an inner optimizer, clipping by TrainStep(clip_grad_norm=...), counts\n"
            "  and averages after the call of the program; or compile the module itself and step in eager code"
        )

    def record_step(self, original: Optimizer, *args: object, **kwargs: object) -> None:
        """Stands in the place of an inner optimizer's step."""
        name = type(original).__qualname__
        if any(value is not None for value in (*args, *kwargs.values())):
            raise CompileError(
                f"{self.name}.step gives {name}.step a closure, which evaluates the model again. A compiled step is one forward, one "
                f"backward and one update\n{self._advice()}"
            )
        if original in self.called:
            raise CompileError(f"{self.name}.step steps {name} twice: a compiled step updates each parameter once\n{self._advice()}")
        for parameter in parameters_of([original]):
            if self.samples[id(parameter)].grad is not self.gradients[id(parameter)]:
                self.writes.found.append(f"it replaces the gradient of {self.name_of(parameter)}")
        self.called.append(original)

    def _numbers(self) -> list[Hashable]:
        """Numbers of the original optimizers, to detect that the step reached them through the copy."""
        return [tuple((k, token(v)) for k, v in group.items() if k != "params") for one in self.optimizers for group in one.param_groups]

    # The copy.

    def _copy(self, value: object, path: str) -> object:
        if isinstance(value, Tensor):
            return self.samples.get(id(value), value)
        if not _is_searchable(value) and value is not self.wrapper:
            return value
        if id(value) not in self.copies:
            self.originals.append(value)
            if type(value) is tuple:
                self.copies[id(value)] = tuple(self._copy(item, f"{path}[{i}]") for i, item in enumerate(value))
            elif isinstance(value, list | dict | set) and type(value) in _CONTAINERS:
                self._copy_container(value, path)
            else:
                self._copy_object(value, path)
        return self.copies[id(value)]

    def _copy_container(self, value: list[object] | dict[object, object] | set[object], path: str) -> None:
        """Copy a container, registered before it is filled, since it may contain itself."""
        made: Any = defaultdict(value.default_factory) if isinstance(value, defaultdict) else type(value)()
        self.copies[id(value)] = made
        if isinstance(value, dict):
            made.update({self._copy(key, path): self._copy(item, f"{path}[{key!r}]") for key, item in value.items()})
        elif isinstance(value, list):
            made.extend(self._copy(item, f"{path}[{i}]") for i, item in enumerate(value))
        else:
            made.update(self._copy(item, path) for item in value)

    def _copy_object(self, value: object, path: str) -> None:
        made = self.copies[id(value)] = object.__new__(type(value))
        self.paths.append((path, made))
        is_optimizer = isinstance(value, Optimizer)
        for name, item in vars(value).items():
            if name.endswith("_hooks"):
                made.__dict__[name] = OrderedDict()
            elif is_optimizer and name == "state":
                made.__dict__[name] = defaultdict(dict)
            elif not (is_optimizer and name == "step"):  # a scheduler's wrapped `step` calls the original
                made.__dict__[name] = self._copy(item, f"{path}.{name}")
        if isinstance(value, Optimizer) and value is not self.wrapper:
            nested = id(value) in self.nested
            made.__dict__["step"] = partial(without_hooks(type(value).step), made) if nested else partial(self.record_step, value)

    def _snapshot(self) -> dict[str, Hashable]:
        """Plain values in the copy, by path."""
        seen: dict[str, Hashable] = {}
        for path, twin in self.paths:
            seen |= attributes(twin, path)
            for index, group in enumerate(vars(twin).get("param_groups", ())):
                seen |= {f"{path}.param_groups[{index}][{k!r}]": token(v) for k, v in group.items()}
        return seen


def _sample(parameter: Tensor, seed: int) -> tuple[nn.Parameter, Tensor]:
    """A small parameter of the same dtype and number of dims, and its gradient."""
    small = tuple(min(size, 3 + i) for i, size in enumerate(parameter.shape))
    generator = torch.Generator().manual_seed(seed)
    value, gradient = (torch.randn(small, generator=generator, dtype=torch.float64).to(parameter.dtype) for _ in range(2))
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    made.grad = gradient
    return made, gradient


class _Writes(TorchDispatchMode):
    """Dispatch mode that records writes to samples, and refuses a write to any other tensor that existed before."""

    def __init__(self, trial: _WrapperTrial) -> None:
        super().__init__()
        self.trial = trial
        self.found: list[str] = []
        self.mine: set[int] = set()
        self.kept: list[Tensor] = []
        self.of = {_memory(sample): (key, "") for key, sample in trial.samples.items()}
        self.of |= {_memory(gradient): (key, "the gradient of ") for key, gradient in trial.gradients.items()}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        for operand in written_operands(func, args, kwargs):
            if isinstance(operand, Tensor):
                self._note(operand)
        given = {_memory(leaf) for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **kwargs)
        for leaf in trees.leaves(result):
            if isinstance(leaf, Tensor) and _memory(leaf) not in given:
                self.mine.add(_memory(leaf))
                self.kept.append(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        memory = _memory(tensor)
        if memory in self.mine:
            return
        if memory not in self.of:
            raise CompileError(
                f"{self.trial.name}.step writes to a tensor that it keeps outside its parameters, of shape {list(tensor.shape)}{_line()}: "
                f"a compiled step would leave that out\n{self.trial._advice()}"
            )
        key, what = self.of[memory]
        if what and key in map(id, parameters_of(self.trial.called)):
            return  # gradients that are cleared after the step
        name = self.trial.name_of(self.trial.parameters[key])
        text = f"it writes to {what}{name}{_line()}"
        if text not in self.found and len(self.found) < 3:
            self.found.append(text)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _line(error: Exception | None = None) -> str:
    """The user's source line that is running, or that raised `error`."""
    source = innermost(traceback.extract_stack() if error is None else traceback.extract_tb(error.__traceback__))
    return f" at {source.file}:{source.line} ({source.code})" if source else ""
