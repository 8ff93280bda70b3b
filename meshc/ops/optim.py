"""Optimizer updates as operators: `meshc::adam`, `meshc::adam_amsgrad`, `meshc::sgd`, `meshc::sgd_plain`.

Each exists twice. The functional one is what a program holds before `fuse_updates`; `NAME_many_` writes into its operands, for whole lists
with one call of torch's fused kernel.

    new_param, new_exp_avg, new_exp_avg_sq, new_step = meshc.adam(param, grad, exp_avg, exp_avg_sq, step, lr, ..., decoupled, maximize)
    meshc.adam_many_(params, grads, exp_avgs, exp_avg_sqs, steps, lr, ..., decoupled, maximize)

Every number is a 0-dim float64 tensor, so that a schedule never recompiles. One on the CPU is read when the operator runs; a learning rate
on an accelerator goes to the fused kernel as a tensor, so that a captured graph sees it change. `step` counts finished updates from 0.
`first` is 1 until a momentum buffer has been written, and the buffer is zero until then. Updates are elementwise in parameter, gradient
and state: any sharding that these share is legal.

Where no fused kernel applies, the arithmetic is that of `torch.optim`'s single-tensor implementations, in their order; Adam's is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.optim.adam import adam

from meshc.ops.definition import misfit, register_kernel


class _Adam(NamedTuple):
    """Numbers and flags of an update, the last arguments of its schema."""

    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor
    weight_decay: Tensor
    decoupled: bool
    maximize: bool


class _SGD(NamedTuple):
    lr: Tensor
    momentum: Tensor
    dampening: Tensor
    weight_decay: Tensor
    nesterov: bool
    maximize: bool


class _PlainSGD(NamedTuple):
    lr: Tensor
    weight_decay: Tensor
    maximize: bool


# name: (operands that the update writes, in the order of the results; the numbers and flags). `grad` stands second in every schema.
_FAMILIES: dict[str, tuple[tuple[str, ...], type[_Adam | _SGD | _PlainSGD]]] = {
    "adam": (("param", "exp_avg", "exp_avg_sq", "step"), _Adam),
    "adam_amsgrad": (("param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"), _Adam),
    "sgd": (("param", "momentum_buffer", "first"), _SGD),
    "sgd_plain": (("param",), _PlainSGD),
}


def _is_first_on_cpu(first: Tensor) -> bool:
    return first.device.type == "cpu" and first.item() != 0


def _number(value: Tensor) -> float:
    return float(value.item())


def _adam_settings(of: _Adam) -> dict[str, Any]:
    """Arguments that torch's function and its fused kernels take alike."""
    numbers = {"beta1": of.beta1, "beta2": of.beta2, "eps": of.eps, "weight_decay": of.weight_decay}
    return {name: _number(value) for name, value in numbers.items()} | {"maximize": of.maximize}


def _adam_one(written: Sequence[Tensor], grad: Tensor, of: _Adam) -> None:
    """One parameter's update in place; `written` is (param, exp_avg, exp_avg_sq, [max_exp_avg_sq,] step)."""
    param, exp_avg, exp_avg_sq, *largest, step = written
    adam(
        [param], [grad], [exp_avg], [exp_avg_sq], largest, [step], foreach=False, decoupled_weight_decay=of.decoupled,
        amsgrad=bool(largest), lr=_number(of.lr), **_adam_settings(of),
    )  # fmt: skip


def _sgd_one(written: Sequence[Tensor], grad: Tensor, of: _SGD | _PlainSGD) -> None:
    """One parameter's update in place; `written` is (param, momentum_buffer, first), or (param,) without momentum."""
    param, *state = written
    decay = _number(of.weight_decay)
    if of.maximize:
        grad = -grad
    if decay != 0:
        grad = grad.add(param, alpha=decay)
    if isinstance(of, _SGD):
        buffer, first = state
        mass, damping = _number(of.momentum), _number(of.dampening)
        if _is_first_on_cpu(first):
            buffer.copy_(grad)
        elif first.device.type == "cpu" or damping == 0:
            buffer.mul_(mass).add_(grad, alpha=1 - damping)
        else:  # reading `first` would make the host wait for the device
            buffer.copy_(torch.where(first != 0, grad, buffer * mass + grad * (1 - damping)))
        first.zero_()
        grad = grad.add(buffer, alpha=mass) if of.nesterov else buffer
    param.add_(grad, alpha=-_number(of.lr))


def _same_layout(tensor: Tensor, param: Tensor) -> bool:
    return (tensor.is_contiguous() and param.is_contiguous()) or tensor.stride() == param.stride() and tensor.shape == param.shape


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride()


def _fusable(param: Tensor, grad: Tensor, state: Sequence[Tensor]) -> bool:
    """Whether torch's fused kernels apply. They iterate over memory, not indices, and on CPU do not check that layouts agree."""
    if (
        param.device.type not in ("cpu", "cuda")
        or not param.is_floating_point()
        or grad.dtype != param.dtype
        or grad.layout != torch.strided
    ):
        return False
    return all(t.dtype == param.dtype and _same_layout(t, param) for t in state) and _is_dense(param)


def _laid_out_like(grad: Tensor, param: Tensor) -> Tensor:
    return grad if _same_layout(grad, param) else torch.empty_like(param).copy_(grad)


def _fit(name: str, operands: Sequence[str], columns: Sequence[Sequence[Tensor]], grads: Sequence[Tensor]) -> None:
    """Raises ValueError unless gradient and state have their parameter's size and device, and a count or a flag one element.

    Shapes are compared on fake tensors only: this runs for every parameter in every step, and sizes cost a third of shapes.
    """
    if any(len(column) != len(grads) for column in columns):
        raise ValueError(f"meshc::{name}: {', '.join(operands)} and grad are lists of one length, not {[*map(len, columns), len(grads)]}")
    single = operands[-1] in ("step", "first")
    for grad, param, *state in zip(grads, *columns, strict=True):
        last = state.pop() if single else None
        fits = last is None or last.numel() == 1
        size, device = param.numel(), param.get_device()
        for tensor in (grad, *state):
            fits = fits and tensor.numel() == size and tensor.get_device() == device
        if not fits:
            rule = "gradient and state have the parameter's shape and device, and step or first is one number"
            given = dict(zip(operands, (param, *state, *([last] if single else [])), strict=True))
            raise misfit(name, rule, grad=grad, **given)


def _scalar_for_kernel(lr: Tensor) -> Tensor | float:
    """A learning rate as torch's fused kernels take it: on CUDA they read it from the device, as 32 bits."""
    if lr.numel() != 1:
        raise misfit("optimizer update", "a learning rate is one number", lr=lr)
    return _number(lr) if lr.device.type == "cpu" else lr.to(torch.float32)


def _partition_for_fused_kernel(
    columns: Sequence[Sequence[Tensor]], grads: Sequence[Tensor], tensors_like_param: int, halves: bool = True
) -> tuple[list[list[int]], list[int]]:
    """(groups of indices for one fused call each, by device and dtype; indices that need the plain update). Without `halves` the CPU kernel
    is not used for 16-bit parameters, most of whose elements it leaves unchanged (torch's SGD, 2.13)."""
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    alone: list[int] = []
    for i, (param, grad) in enumerate(zip(columns[0], grads, strict=True)):
        known = halves or param.itemsize > 2 or param.device.type != "cpu"
        if known and _fusable(param, grad, [column[i] for column in columns[1:tensors_like_param]]):
            together.setdefault((param.device, param.dtype), []).append(i)
        else:
            alone.append(i)
    return list(together.values()), alone


def _adam_many(columns: Sequence[Sequence[Tensor]], grads: Sequence[Tensor], of: _Adam) -> None:
    kernel = torch._fused_adamw_ if of.decoupled else torch._fused_adam_
    together, alone = _partition_for_fused_kernel(columns, grads, len(columns) - 1)
    for indices in together:
        params, exp_avgs, exp_avg_sqs, *largest = ([column[i] for i in indices] for column in columns[:-1])
        steps = [columns[-1][i] for i in indices]
        torch._foreach_add_(steps, 1)
        kernel(
            params,
            [_laid_out_like(grads[i], columns[0][i]) for i in indices],
            exp_avgs,
            exp_avg_sqs,
            largest[0] if largest else [],
            [s if s.dtype == torch.float32 and s.device == params[0].device else s.to(params[0].device, torch.float32) for s in steps],
            lr=_scalar_for_kernel(of.lr),
            amsgrad=bool(largest),
            **_adam_settings(of),
        )
    for i in alone:
        _adam_one([column[i] for column in columns], grads[i], of)


def _sgd_many(columns: Sequence[Sequence[Tensor]], grads: Sequence[Tensor], of: _SGD | _PlainSGD) -> None:
    params, *state = columns
    buffers, firsts = state or ((), ())
    mass, damping, nesterov = (_number(of.momentum), _number(of.dampening), of.nesterov) if isinstance(of, _SGD) else (0.0, 0.0, False)
    together, alone = _partition_for_fused_kernel(columns, grads, 2, halves=False)
    for indices in together:
        by_first: dict[bool, list[int]] = {}
        for i in indices:
            if not firsts or firsts[i].device.type == "cpu" or damping == 0:
                by_first.setdefault(bool(firsts) and _is_first_on_cpu(firsts[i]), []).append(i)
            else:
                alone.append(i)
        for is_first, members in by_first.items():
            torch._fused_sgd_(
                [params[i] for i in members],
                [_laid_out_like(grads[i], params[i]) for i in members],
                [buffers[i] for i in members] if buffers else [],
                weight_decay=_number(of.weight_decay),
                momentum=mass,
                lr=_scalar_for_kernel(of.lr),
                dampening=damping,
                nesterov=nesterov,
                maximize=of.maximize,
                is_first_step=is_first,
            )
            written = [firsts[i] for i in members if is_first or firsts[i].device.type != "cpu"] if firsts else []
            if written:
                torch._foreach_zero_(written)
    for i in alone:
        _sgd_one([column[i] for column in columns], grads[i], of)


def _define(name: str, one: Callable[..., None], many: Callable[..., None]) -> None:
    """Register the two forms of one update: `one(written, grad, numbers)` and `many(columns, grads, numbers)` work in place."""
    operands, numbers = _FAMILIES[name]
    last = ", ".join(f"{kind.__name__} {field}" for field, kind in get_type_hints(numbers).items())
    count = len(operands)

    def fit(param, grad, *rest):  # type: ignore[no-untyped-def]
        if isinstance(grad, Tensor):
            _fit(name, operands, [[t] for t in (param, *rest[: count - 1])], [grad])
        else:
            _fit(name, operands, [param, *rest[: count - 1]], grad)

    def in_place_many(params, grads, *rest):  # type: ignore[no-untyped-def]
        fit(params, grads, *rest)
        if params:
            many([params, *rest[: count - 1]], grads, numbers(*rest[count - 1 :]))

    def functional(param, grad, *rest):  # type: ignore[no-untyped-def]
        fit(param, grad, *rest)
        written = [t.clone() for t in (param, *rest[: count - 1])]
        if param.device.type == "cpu":
            one(written, grad, numbers(*rest[count - 1 :]))
        else:  # the fused kernel needs no step count on the host
            many([[t] for t in written], [grad], numbers(*rest[count - 1 :]))
        return written[0] if count == 1 else tuple(written)

    def functional_fake(param, grad, *rest):  # type: ignore[no-untyped-def]
        fit(param, grad, *rest)
        if grad.shape != param.shape:
            raise misfit(name, "the gradient has its parameter's shape", grad=grad, param=param)
        written = tuple(torch.empty_like(t) for t in (param, *rest[: count - 1]))
        return written[0] if count == 1 else written

    def schema(kind: str, form: Callable[[int, str], str], grad: str, returns: str) -> str:
        first, *others = (form(i, operand) for i, operand in enumerate(operands))
        return f"{kind}({', '.join([first, grad, *others, last])}) -> {returns}"

    returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    register_kernel(schema(name, lambda i, operand: f"Tensor {operand}", "Tensor grad", returns), functional, functional_fake)
    lists = schema(f"{name}_many_", lambda i, operand: f"Tensor({'abcdefgh'[i]}!)[] {operand}s", "Tensor[] grads", "()")
    register_kernel(lists, in_place_many, fit)


_define("adam", _adam_one, _adam_many)
_define("adam_amsgrad", _adam_one, _adam_many)
_define("sgd", _sgd_one, _sgd_many)
_define("sgd_plain", _sgd_one, _sgd_many)

UPDATES: tuple[torch._ops.OpOverload, ...] = tuple(getattr(torch.ops.meshc, name).default for name in _FAMILIES)
"""The functional updates."""

MANY: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {
    op: getattr(torch.ops.meshc, f"{name}_many_").default for name, op in zip(_FAMILIES, UPDATES, strict=True)
}
"""Functional update to its list-taking twin: every operand but the numbers and flags becomes a list."""

WRITTEN: dict[torch._ops.OpOverload, tuple[int, ...]] = {
    op: (0, *range(2, len(operands) + 1)) for (operands, _), op in zip(_FAMILIES.values(), UPDATES, strict=True)
}
"""Functional update to the argument positions that its results replace, in the order of the results (position 1 is the gradient)."""
