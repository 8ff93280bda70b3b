"""Torch function mode that runs a step written for Python floats on 0-dim tensors.

    alpha = -lr / (1 - beta1 ** step)             operators on 0-dim float64 tensors
    param.add_(grad, alpha=alpha)                 param.copy_(param + grad * alpha)
    if rho > 5:                                   depends on the step: raises Branch; both branches are traced
    if weight_decay != 0:                         depends on the group's numbers only: decided now, and recorded as a guard

Every torch call of the step is intercepted before its arguments are parsed, by a `TorchFunctionMode`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshc.errors import CompileError
from meshc.ir import trees
from meshc.ir.functions import Function
from meshc.optimizer.spec import RELATIONS, NumberGuard
from meshc.private import DataDependentOutputException

_COMPARISONS = {
    key: sign for sign, relation in RELATIONS.items() for key in (relation.__name__, f"__{relation.__name__}__")
}
_PYTHON: dict[str, Function] = {
    "add": operator.add, "__add__": operator.add, "__radd__": operator.add, "sub": operator.sub, "__sub__": operator.sub,
    "__rsub__": lambda a, b: b - a, "mul": operator.mul, "__mul__": operator.mul, "__rmul__": operator.mul, "div": operator.truediv,
    "__truediv__": operator.truediv, "__rtruediv__": lambda a, b: b / a, "__rdiv__": lambda a, b: b / a, "pow": operator.pow,
    "__pow__": operator.pow, "__rpow__": lambda a, b: b**a, "neg": operator.neg, "__neg__": operator.neg, "sqrt": lambda a: a**0.5,
    "abs": abs, "__abs__": abs, "item": lambda a: a, "__pos__": lambda a: a,
    **{name: RELATIONS[relation] for name, relation in _COMPARISONS.items()},
}  # fmt: skip
_AUGMENTED = {
    "__iadd__": "__add__", "__isub__": "__sub__", "__imul__": "__mul__", "__itruediv__": "__truediv__", "__idiv__": "__truediv__",
    "__ipow__": "__pow__",
}  # fmt: skip
_METADATA = ("dim", "size", "numel", "stride", "is_floating_point", "is_complex", "element_size", "is_contiguous", "__len__")

_ATTRIBUTES: Any = Tensor  # to a type checker, `Tensor.grad` is a value, not a descriptor


class HeldGradients(TorchFunctionMode):
    """A context in which `.grad` of parameters is what is held here, whatever torch would allow to be put there, and `.data` of a tensor
    is the tensor. grads: (parameter, its gradient), by the parameter's id."""

    def __init__(self, *pairs: tuple[Tensor, Tensor | None]) -> None:
        super().__init__()
        self.grads = {id(parameter): (parameter, gradient) for parameter, gradient in pairs}

    def __torch_function__(self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        grad, data = _ATTRIBUTES.grad, _ATTRIBUTES.data
        held = self.grads.get(id(args[0])) if args else None
        if held is not None and func == grad.__get__:
            return held[1]
        if held is not None and func in (grad.__set__, grad.__delete__):
            self.grads[id(args[0])] = held[0], args[1] if func == grad.__set__ else None
            return None
        if func == data.__get__:
            return args[0]
        if func == data.__set__:
            return args[0].copy_(args[1])
        return func(*args, **(kwargs or {}))


class UndecidedBranch(BaseException):
    """Raised at `bool()` of a value known only at run time. Not an Exception: an optimizer's own handlers must not catch it."""

    def __init__(self, condition: Tensor) -> None:
        self.condition = condition


@dataclass
class _TracedNumber:
    """A 0-dim float64 (or bool) tensor that stands for a Python number. `value` is known if it depends on the group's numbers only."""

    tensor: Tensor  # held so that its id is not reused
    value: float | bool | None
    names: frozenset[str]
    is_input: bool = False
    relation: tuple[str, str, float] | None = None  # (number, relation, constant) if it is one comparison of an input


class NumbersAsTensors(HeldGradients):
    """Runs a step written for Python floats on 0-dim tensors.

    Intercepts each torch call before its arguments are parsed: a tensor in the place of a scalar (`add_(g, alpha=-lr)`) is rewritten to
    arithmetic, `.item()` stays a tensor, and `bool()` decides or branches. A call that requires a float gets the number's present value,
    which is recorded as a guard.
    """

    def __init__(self, name: str, decisions: Sequence[bool], param: Tensor, grad: Tensor) -> None:
        super().__init__((param, grad))
        self.name = name
        self.decisions = list(decisions)
        self.known: dict[int, _TracedNumber] = {}
        self.scalar_state: dict[int, Tensor] = {}
        self.guards: list[NumberGuard] = []

    def number(self, tensor: Tensor, value: float | bool | None = None, names: frozenset[str] = frozenset()) -> Tensor:
        self.known[id(tensor)] = _TracedNumber(tensor, value, names)
        return tensor

    def _lookup(self, value: Any) -> _TracedNumber | None:
        return self.known.get(id(value)) if isinstance(value, Tensor) else None

    def _guard(self, guard: NumberGuard) -> None:
        if guard not in self.guards:
            self.guards.append(guard)

    def _specialise(self, number: _TracedNumber, why: str) -> float | bool:
        if number.value is None:
            raise CompileError(
                f"{self.name}.step uses {why} on a value that changes from step to step (a step count, or one computed from "
                "gradients), which would be compiled in as a constant. Write it with tensor operations (x ** 0.5 instead of "
                "math.sqrt(x)), or keep it a tensor in the state."
            )
        for name in sorted(number.names):
            self._guard(NumberGuard(name, "is"))
        return number.value

    def _truth(self, value: Tensor) -> bool:
        number = self._lookup(value)
        if number is not None and number.value is not None:
            if number.relation is not None:
                self._guard(NumberGuard(*number.relation))
            else:
                self._specialise(number, "a branch")
            return bool(number.value)
        if value.numel() != 1:
            raise CompileError(f"{self.name}.step asks for the truth of a tensor of shape {tuple(value.shape)}.")
        if not self.decisions:
            raise UndecidedBranch(value.reshape(()) if value.dtype == torch.bool else value.reshape(()) != 0)
        return self.decisions.pop(0)

    def __torch_function__(self, func: Function, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            return super().__torch_function__(func, types, args)
        if name == "__bool__":
            return self._truth(args[0])
        if name in ("__float__", "__int__", "__index__", "__complex__", "tolist"):
            value = self._specialise(self._lookup(args[0]) or _TracedNumber(args[0], None, frozenset()), f"{name.strip('_')}()")
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

    def _each(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Results of a `_foreach_` function, computed one tensor at a time."""
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

    def _call(self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = kwargs.pop("out", None)
        if isinstance(out, Tensor):
            return out.copy_(self._call(func, name, args, kwargs))
        flat = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        writes = name.endswith("_") and not name.startswith("_") or name in _AUGMENTED
        if flat and not writes and all(id(a) in self.known or id(a) in self.scalar_state for a in flat):
            return self._arithmetic(func, name, args, kwargs)
        within = [item for a in args if type(a) in (tuple, list) for item in a if isinstance(item, Tensor)]  # as in a shape
        numbers = [self.known[id(a)] for a in (*flat, *within) if id(a) in self.known]
        of_data = any(isinstance(kwargs.get(scale), Tensor) for scale in ("alpha", "value"))  # torch would read the value
        if not numbers and not of_data and name not in ("tensor", "as_tensor", "scalar_tensor", "__setitem__"):
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
        except (DataDependentOutputException, TypeError):  # the call wants a Python number
            if not numbers:
                raise

            def present(value: Any) -> Any:
                """A traced number, also in a shape, by its present value, which becomes a guard."""
                number = self._lookup(value)
                return value if number is None else self._specialise(number, f"{name}()")

            args, kwargs = trees.map_leaves(present, (args, kwargs))
            return func(*args, **kwargs)

    def _plain(self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name.endswith("_") and name.rstrip("_") in _COMPOSITE:
            return args[0].copy_(getattr(args[0], name.rstrip("_"))(*args[1:], **kwargs))
        return func(*args, **kwargs)

    def _cast(self, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if self._lookup(a) and a.dtype != torch.bool else a for a in args)

    def _arithmetic(self, func: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of an operation among traced numbers: a number in float64, as in Python, whatever dtype a step count is stored in."""
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
        """The value that Python would compute; None unless all operands depend on the group's numbers only."""
        plain: list[Any] = []
        for arg in args:
            number = self._lookup(arg)
            if isinstance(arg, Tensor) and (number is None or number.value is None):
                return None
            plain.append(arg if number is None else number.value)
        return _PYTHON[name](*plain) if name in _PYTHON and not kwargs else None


def _compute_dtype(tensor: Tensor, *others: Tensor) -> torch.dtype:
    """The dtype in which torch's kernels compute: float32 for half precision, which is rounded once, at the end."""
    dtype = tensor.dtype
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype) if other.dim() or not tensor.dim() else dtype
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _add_scaled(tensor: Any, other: Any, alpha: Any = 1, *, sign: int = 1) -> Any:
    if not isinstance(alpha, Tensor):
        return None
    factor = alpha if sign > 0 else -alpha
    if not isinstance(other, Tensor):
        return tensor + other * factor
    dtype = _compute_dtype(tensor, other)
    return (tensor.to(dtype) + other.to(dtype) * factor).to(torch.result_type(tensor, other))


def _with_value(combine: Callable[[Any, Any], Any]) -> Function:
    def rewrite(tensor: Any, first: Any, second: Any, *, value: Any = 1) -> Any:
        if not isinstance(value, Tensor):
            return None
        dtype = _compute_dtype(tensor, first, second)
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
_REWRITES: dict[str, Function] = {
    "add": _add_scaled,
    "sub": lambda tensor, other, alpha=1: _add_scaled(tensor, other, alpha, sign=-1),
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
