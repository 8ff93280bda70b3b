"""Log of a model's calls, layer by layer, from one run on meta tensors.

    outside     embedding(input:input_ids, parameter:embed.weight)
    layers.0    linear(outside 0, own norm.weight) ...
    layers.1    linear(layers.0 row 41, own norm.weight) ...
    outside     linear(layers.1 row 41, parameter:lm_head.weight)

Nothing is traced: a torch function mode records calls, with `torch.compiler.is_compiling()` true, as in a trace. Code that reads values
cannot run so. Changes that the model's code makes to Python values are undone (`python_state.py`).
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshc.frontend.capture import Root, fake_tensors
from meshc.frontend.capture_patches import traceable_model
from meshc.frontend.output_tree import OutputTree
from meshc.ir import trees
from meshc.ir.paths import input_names
from meshc.ops.random_calls import is_random
from meshc.passes.depth.comparable_values import comparable_value
from meshc.passes.depth.python_state import preserve_python_state
from meshc.passes.phases.request import Request
from meshc.replacements import replace_in, replace_targets

Place = tuple[str, int]
"""A layer: the path of its list, and its number in it."""
Origin = tuple[Any, ...]
"""Where a tensor comes from: ("parameter", name), ("input", path), ("outside", row, result), ("layer", list, number, row, result), ("held",
index) of a tensor that existed before the run and is no parameter.
"""
UNKNOWN: Final[Origin] = ("unknown",)
"""Origin of a tensor that was created past torch's functions (`torch.from_numpy`): equal to nothing."""

QUESTIONS: Final = frozenset({
    "size", "dim", "numel", "stride", "is_contiguous", "is_floating_point", "is_complex", "ndimension", "__len__", "element_size",
    "nelement", "storage_offset", "is_inference",
})  # fmt: skip
"""Calls that create no value and change none."""
BUILT_IN: Final = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
"""Types of torch's functions that are not written in Python."""
LEAST: Final = 5
"""Length from which some layers of a list can be left out."""


@dataclass(frozen=True)
class RecordedCall:
    """One call: `what` is the function, its arguments with tensors as their types, and the state that it ran in; `origins` are those of the
    tensors."""

    what: tuple[Any, ...]
    origins: tuple[Origin, ...]


@dataclass
class Log:
    """
    outside  calls outside layers
    calls    calls of layers, each with the number of outside rows before it
    layers   by layer, the calls inside it
    leaves   origins of the output's leaves; None for leaves that are no tensors
    given    objects among the arguments, kept alive since they are compared by identity
    """

    outside: list[RecordedCall] = field(default_factory=list)
    calls: list[tuple[Place, int]] = field(default_factory=list)
    layers: dict[Place, list[RecordedCall]] = field(default_factory=dict)
    leaves: list[Origin | None] = field(default_factory=list)
    output: OutputTree | None = None
    given: list[Any] = field(default_factory=list)

    def values(self) -> list[int]:
        """Common subexpressions outside: per row, the first row that is the same call of the same values; itself if it draws random
        numbers."""
        found: list[int] = []
        first: dict[tuple[Any, ...], int] = {}
        for number, row in enumerate(self.outside):
            origins = tuple(("outside", found[origin[1]], *origin[2:]) if origin[0] == "outside" and origin[1] < number else origin
                            for origin in row.origins)  # fmt: skip
            found.append(number if is_random(row.what[0]) else first.setdefault((row.what, origins), number))
        return found


def probe(request: Request, lists: Sequence[str]) -> Log:
    """Log of the request's call, by layers of `lists`. Raises whatever the model's code raises on tensors without values."""
    module = request.module
    with (
        preserve_python_state(module, (request.function, request.signature)) as there,
        traceable_model(module),
        fake_tensors(module, None) as (held, _),
    ):
        recorder = _CallRecorder()
        for number, tensor in enumerate(there):
            recorder.name(tensor, ("held", number))
        for name, tensor in held.items():
            recorder.name(tensor, ("parameter", name))
        names = input_names(request.signature, request.args, request.kwargs)
        given, spec = trees.flatten((tuple(request.args), dict(request.kwargs)))
        leaves = [_like(leaf, request.grad) for leaf in given]
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                recorder.name(leaf, ("input", name))
        args, kwargs = trees.unflatten(leaves, spec)
        root = Root(module, request.function, request.autocast)
        root.training = module.training
        with (
            torch.set_grad_enabled(request.grad),
            replace_targets(compiling_flag=True, dynamo_compiling=lambda: True),
            recorder.watching(module, lists),
            torch.device("meta"),
            recorder,
        ):
            output = root(*args, **kwargs)
        found, tree = trees.flatten(output)
        plain = {index: leaf for index, leaf in enumerate(found) if not isinstance(leaf, torch.Tensor)}
        recorder.log.leaves = [recorder.origin(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in found]
        recorder.log.output = OutputTree(tree, plain)
        return assign_rows_between(recorder.log)


def assign_rows_between(log: Log) -> Log:
    """The log with calls between one layer and the next moved to the start of the next one's rows, numbered below 0."""
    moved: dict[int, Origin] = {}
    ahead: dict[Place, list[RecordedCall]] = {}
    for ((path, number), start), (place, end) in zip(log.calls, log.calls[1:], strict=False):
        if place == (path, number + 1) and place not in ahead:
            ahead[place] = log.outside[start:end]
            moved |= {row: ("layer", *place, row - end) for row in range(start, end)}
    if not moved:
        return log
    order = [row for row in range(len(log.outside)) if row not in moved]
    moved |= {row: ("outside", number) for number, row in enumerate(order)}

    def of(origin: Origin) -> Origin:
        if origin[0] == "outside":
            return (*moved.get(origin[1], ("outside", len(order))), *origin[2:])
        return origin

    def rename_origins(rows: Sequence[RecordedCall]) -> list[RecordedCall]:
        return [RecordedCall(row.what, tuple(map(of, row.origins))) for row in rows]

    return Log(
        rename_origins([log.outside[row] for row in order]),
        [(place, sum(row not in moved or moved[row][0] == "outside" for row in range(before))) for place, before in log.calls],
        {place: rename_origins([*ahead.get(place, ()), *rows]) for place, rows in log.layers.items()},
        [leaf and of(leaf) for leaf in log.leaves],
        log.output,
        log.given,
    )


def _like(leaf: Any, grad: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta").requires_grad_(grad and leaf.requires_grad)


class _CallRecorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.log = Log()
        self.at: Place | None = None
        self.origins: dict[int, Origin] = {}
        self.known: dict[object, Callable[[], torch.Tensor]] = {}
        self.alive: list[torch.Tensor] = []

    def name(self, tensor: torch.Tensor, origin: Origin) -> None:
        self.origins[id(tensor)] = origin
        self.alive.append(tensor)

    def origin(self, tensor: torch.Tensor) -> Origin:
        if id(tensor) not in self.origins and tensor.device.type == "meta":  # created unseen, inside an operator
            self.name(tensor, (*self._here(), len(self._rows()), "inside"))
        return self.origins.get(id(tensor), UNKNOWN)

    def _here(self) -> Origin:
        return ("outside",) if self.at is None else ("layer", *self.at)

    # ---------------------------------------------------------------------------------------------------------------- the layers

    @contextlib.contextmanager
    def watching(self, module: nn.Module, lists: Sequence[str]) -> Iterator[None]:
        """A context in which calls inside the lists' layers, hooks included, are recorded by layer."""
        layers = [(layer, (path, number)) for path in lists for number, layer in enumerate(module.get_submodule(path).children())]
        own: Any = vars(torch.autograd.Function)["apply"]
        with (
            replace_in("layer_call", [(layer, "_call_impl", self._wrap_layer(place, layer._call_impl)) for layer, place in layers]),
            replace_targets(autograd_function=classmethod(self._wrap_autograd_apply(own))),
        ):
            yield

    def _wrap_layer(self, place: Place, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_layer(*args: Any, **kwargs: Any) -> Any:
            if self.at is not None:
                return call(*args, **kwargs)
            self.log.calls.append((place, len(self.log.outside)))
            self.log.layers.setdefault(place, []).append(RecordedCall(("called",), ()))
            self.at = place
            try:
                return call(*args, **kwargs)
            finally:
                self.at = None

        return call_layer

    def _wrap_autograd_apply(self, own: Any) -> Callable[..., Any]:
        """Records calls of user-defined autograd functions with their arguments, since their backward is not run here. Those of registered
        operators are skipped: the operators have been recorded."""

        def apply_recording(kind: type, *args: Any, **kwargs: Any) -> Any:
            if kind.__module__.startswith("torch._library."):
                return own.__get__(None, kind)(*args, **kwargs)
            tensors: list[torch.Tensor] = []
            given = self._plain_data((args, kwargs), tensors)
            self._rows().append(RecordedCall(("function", kind, given), tuple(map(self.origin, tensors))))
            return own.__get__(None, kind)(*args, **kwargs)

        return apply_recording

    # ------------------------------------------------------------------------------------------------------------------ the calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in QUESTIONS:
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        with torch._C.DisableTorchFunction():  # the recorder's own queries are not recorded
            given = self._plain_data((args, kwargs), tensors)
            what, origins = (_function_identity(function), given, _state()), tuple(map(self.origin, tensors))  # before it writes into them
            key = self._key(function, name, kwargs, what, tensors)
            result = self.known[key]() if key in self.known else None
        if result is None:
            result = function(*args, **kwargs)
            self._store_result(key, result)
        made = [one for one in _leaves(result) if isinstance(one, torch.Tensor)]
        if name == "__get__" and not made:
            return result
        rows = self._rows()
        rows.append(RecordedCall(what, origins))
        written = [args[0]] if args and _writes(name) else [kwargs["out"]] if "out" in kwargs else []
        for place, one in enumerate((*made, *written)):
            if isinstance(one, torch.Tensor) and (id(one) not in self.origins or any(one is other for other in written)):
                self.name(one, (*self._here(), len(rows) - 1, place))
        return result

    def _key(self, function: Any, name: str, kwargs: Any, what: tuple[Any, ...], of: Sequence[torch.Tensor]) -> object:
        """The memoisation key of a call; None if it has none. It has one if the function is torch's own, writes nothing and takes meta
        tensors and hashable arguments only: where the same call has returned one tensor before, an empty tensor like that is its result,
        and equal layers make the same calls."""
        own = isinstance(function, BUILT_IN) or getattr(function, "__module__", "").startswith("torch.")
        if not own or _writes(name) or "out" in kwargs:
            return None
        if not of or any(type(one) not in (torch.Tensor, nn.Parameter) or one.device.type != "meta" for one in of):
            return None
        try:
            hash(what)
        except TypeError:
            return None
        return what, tuple((one.stride(), one.storage_offset()) for one in of)

    def _store_result(self, key: object, result: object) -> None:
        if key is not None and type(result) is torch.Tensor and id(result) not in self.origins and result.device.type == "meta":
            self.known[key] = partial(_empty_like_result, tuple(result.shape), result.stride(), result.dtype, result.requires_grad)

    def _rows(self) -> list[Any]:
        return self.log.outside if self.at is None else self.log.layers[self.at]

    def _plain_data(self, value: Any, tensors: list[torch.Tensor]) -> Any:
        """An argument as plain data, tensors as their types; the tensors are appended to `tensors`."""
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return ("tensor", tuple(value.shape), value.dtype, value.requires_grad)
        if isinstance(value, list | tuple):
            return tuple(self._plain_data(item, tensors) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._plain_data(item, tensors)) for key, item in value.items())
        if isinstance(value, slice):
            return ("slice", *(self._plain_data(item, tensors) for item in (value.start, value.stop, value.step)))
        if isinstance(value, int | float | complex | str | bytes | type(None)):
            return (type(value).__name__, repr(value))
        if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
            return value
        self.log.given.append(value)
        integers: list[int] = []
        return (comparable_value(value, integers), tuple(integers))


def _empty_like_result(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
    """An empty meta tensor like the memoised result of an operator."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return made.requires_grad_().clone() if requires_grad else made


def _function_identity(function: Any) -> Any:
    """The identity of a function; getters of attributes are created anew each time, so by name."""
    owner = getattr(function, "__self__", None)
    return (function.__name__, getattr(owner, "__name__", "")) if getattr(function, "__name__", "") == "__get__" else function


def _writes(name: str) -> bool:
    """Whether a call changes its first argument."""
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def _leaves(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else tuple(value.values()) if isinstance(value, Mapping) else (value,)


def _state() -> tuple[Any, ...]:
    """Global state that a call's result or backward depends on."""
    casts = tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts
