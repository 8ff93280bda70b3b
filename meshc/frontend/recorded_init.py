"""Recorded initialisation of a model: the function runs once without computing, and any rank computes any part of its result later.

    recording = Recording(seed, step)
    with recording:
        weight = recording.tensor(0, (8, 4), torch.float32)     # a tensor without memory
        nn.init.normal_(weight)                                 # random call 0
        weight[3].zero_()
    recording.read(weight, ((2, 4), (0, 4)))                    # rows 2 and 3: the draws of call 0 there, and zeros

Random calls are numbered and drawn as in `meshc.reference.ReferenceRandom`: the function run on one device inside that mode gives the same
bits. Where the function looks at a value (`if not mask.any()`), the value is computed at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshc.errors import StateError
from meshc.frontend.recorded_values import (
    Box,
    Evaluation,
    Geometry,
    InitialValue,
    RecordedValue,
    Result,
    TensorValue,
    ViewValue,
    WrittenValue,
)
from meshc.frontend.reference_random import Answer, Named, ReferenceRandom, undefined_error
from meshc.ir.schemas import written_arguments
from meshc.private import OpOverload, trees_of_torch

aten = torch.ops.aten
_LOOKS_AT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _SharedStorage:
    """The storage that tensors share: its present value."""

    def __init__(self, recording: Recording, base: Tensor, value: RecordedValue) -> None:
        self.recording, self.base, self.value = recording, base, value


class RecordedTensor(Tensor):
    """A tensor without memory: a view (`shadow`, on `meta`) of a `_SharedStorage`."""

    memory: _SharedStorage
    shadow: Tensor

    @staticmethod
    def __new__(cls, memory: _SharedStorage, shadow: Tensor) -> RecordedTensor:
        made: RecordedTensor = Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), storage_offset=shadow.storage_offset(), dtype=shadow.dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        made.memory, made.shadow = memory, shadow
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"Recorded({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Named | None = None) -> Any:
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]  # a descriptor of torch's
            target, value = args
            with torch.no_grad():
                target.copy_(_fitting(target, value))
            return None
        with torch._C.DisableTorchFunctionSubclass():  # the result is a Recorded only if created as one
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is a function that is no classmethod
        cls, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Named | None = None
    ) -> Any:
        return _recorded_tensors((args, kwargs))[0].memory.recording.record(func, args, kwargs or {})


def _fitting(target: Tensor, value: Tensor) -> Tensor:
    if value.shape != target.shape or value.dtype != target.dtype:
        raise StateError(
            f"`.data` of a {target.dtype} tensor of shape {list(target.shape)} was given one of {value.dtype} {list(value.shape)}: weights "
            "keep the shape and dtype that they were compiled with"
        )
    return value


class Recording(ReferenceRandom):
    """The mode in which a function is recorded. `given(at)` is the whole value of tensor `at` before; None where there was none."""

    def __init__(self, seed: int, step: int, given: Callable[[int], Tensor | None] = lambda at: None) -> None:
        super().__init__(seed, step)
        self.evaluation = Evaluation(seed, step, given)
        self._count = 0
        self._said = hashlib.sha256()

    def tensor(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> RecordedTensor:
        """A tensor that the function may write: number `at` of the model's."""
        shadow = torch.empty(tuple(shape), dtype=dtype, device="meta")
        return RecordedTensor(_SharedStorage(self, shadow, InitialValue(self._next(), Geometry.of(shadow), dtype, at=at)), shadow)

    def value(self, x: Tensor) -> RecordedValue:
        """The present value of a tensor, recorded or not."""
        if not isinstance(x, RecordedTensor):
            self._update_digest(_content(x))
            return TensorValue(
                self._next(), Geometry.of(torch.empty(x.shape, device="meta")), x.dtype, tensor=x.detach().to("cpu", copy=True)
            )
        where = Geometry.of(x.shadow)
        if where == Geometry.of(x.memory.base):
            return x.memory.value
        return ViewValue(self._next(), where, x.dtype, base=x.memory.value)

    def is_untouched(self, x: Tensor) -> bool:
        """Whether a tensor of the model still has its value from before."""
        return isinstance(x, RecordedTensor) and isinstance(x.memory.value, InitialValue)

    def compute_box(self, value: RecordedValue | Tensor, box: Box | None = None) -> Tensor:
        """A box of a value, in memory of its own."""
        return self.evaluation.compute_box(self.value(value) if isinstance(value, Tensor) else value, box)

    def digest(self, values: Sequence[RecordedValue]) -> str:
        """A hash of all recorded calls, and of the values' numbers: equal on two ranks that have recorded the same."""
        return hashlib.sha256(self._said.digest() + repr([value.number for value in values]).encode()).hexdigest()

    # ------------------------------------------------------------------------------------------------------------- recording

    def answer_call(self, answer: Answer, func: OpOverload, args: Sequence[object], kwargs: Named) -> object:
        known = _recorded_tensors((args, kwargs))
        if not known:
            return super().answer_call(answer, func, args, kwargs)
        if "out" in kwargs:
            raise undefined_error(func, kwargs)
        _, call, _ = self.next(func, known[0].shape, None)
        return self.record(func, args, kwargs, call)

    def record(self, func: OpOverload, args: Sequence[Any], kwargs: Named, call: int | None = None) -> Any:
        """Records one call of an operator that has a recorded tensor among its operands."""
        written = _overwritten_operands(func, args, kwargs)
        if _LOOKS_AT & set(func.tags) or any(not isinstance(x, RecordedTensor) for _, x in written):
            return self._run_now(func, args, kwargs)
        if func is aten.any.default:
            return self._any_nonzero(args[0])
        if torch.Tag.inplace_view in func.tags:
            raise StateError(f"{func} changes the shape of a tensor in place, which is not recorded\n  what to do: call it without the _")
        shadows = trees_of_torch.tree_map(_shadow, (tuple(args), dict(kwargs)))
        made = func(*shadows[0], **{name: _on_meta(name, value) for name, value in shadows[1].items()})
        before = trees_of_torch.tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, Tensor) else leaf, (tuple(args), dict(kwargs)))
        self._update_digest((str(func), call, *(_leaf_key(leaf) for leaf in trees_of_torch.tree_leaves(before))))

        def result(x: Tensor, **which: Any) -> Result:
            return Result(self._next(), Geometry.of(x), x.dtype, func=func, args=before[0], kwargs=before[1], call=call, **which)

        for at, x in written:
            self._write(x, result(x.shadow, written=at))
        known = _recorded_tensors((args, kwargs))
        leaves, tree = trees_of_torch.tree_flatten(made)
        outputs = [self._output(x, known, partial(result, x, output=at)) for at, x in enumerate(leaves)]
        return trees_of_torch.tree_unflatten(outputs, tree)

    def _output(self, x: Any, known: Sequence[RecordedTensor], result: Callable[[], Result]) -> Any:
        if not isinstance(x, Tensor):
            return x
        for operand in known:
            if x is operand.shadow:
                return operand
        for operand in known:
            if x.untyped_storage()._cdata == operand.memory.base.untyped_storage()._cdata:
                return RecordedTensor(operand.memory, x)
        return RecordedTensor(_SharedStorage(self, x, result()), x)

    def _write(self, x: RecordedTensor, value: RecordedValue) -> None:
        memory, where = x.memory, Geometry.of(x.shadow)
        if where != Geometry.of(memory.base):
            value = WrittenValue(self._next(), Geometry.of(memory.base), memory.base.dtype, base=memory.value, where=where, value=value)
        memory.value = value

    def _any_nonzero(self, x: RecordedTensor) -> Tensor:
        """`any` is computed a chunk at a time: its caller branches on it (`trunc_normal_`)."""
        found = torch.tensor(self.evaluation.holds_anywhere(self.value(x)))
        self.evaluation.forget()
        return found

    def _run_now(self, func: OpOverload, args: Sequence[Any], kwargs: Named) -> Any:
        """Runs a call that needs its operands' values."""
        real = trees_of_torch.tree_map(
            lambda leaf: self.compute_box(leaf) if isinstance(leaf, RecordedTensor) else leaf, (tuple(args), dict(kwargs))
        )
        self.evaluation.forget()
        return func(*real[0], **real[1])

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _update_digest(self, what: object) -> None:
        self._said.update(repr(what).encode())


def _overwritten_operands(func: OpOverload, args: Sequence[Any], kwargs: Named) -> list[tuple[int | str, Any]]:
    """(position or name, operand) of the operands that a call overwrites."""
    named = written_arguments(func).items()
    return [(at, args[at]) if at < len(args) else (name, kwargs[name]) for at, name in named if at < len(args) or name in kwargs]


def _recorded_tensors(given: object) -> list[RecordedTensor]:
    return [leaf for leaf in trees_of_torch.tree_leaves(given) if isinstance(leaf, RecordedTensor)]


def _shadow(leaf: Any) -> Any:
    if isinstance(leaf, RecordedTensor):
        return leaf.shadow
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _on_meta(name: str, value: Any) -> Any:
    return torch.device("meta") if name == "device" and value is not None else value


def _leaf_key(leaf: Any) -> Any:
    return ("value", leaf.number) if isinstance(leaf, RecordedValue) else leaf


def _content(x: Tensor) -> tuple[str, tuple[int, ...], str]:
    raw = x.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return str(x.dtype), tuple(x.shape), hashlib.sha256(raw.numpy().tobytes()).hexdigest()
