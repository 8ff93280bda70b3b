"""`meshc::take`: one entry a row, by index; cross-entropy written with it; and `meshc::one_hot`, its counterpart.

    take(x [rows..., columns], index [rows...], ignore) -> [rows...]      zero where index == ignore
    take_backward(grad [rows...], index [rows...], ignore, columns) -> [rows..., columns]
    one_hot(index [rows...], columns) -> [rows..., columns]                     1 where the column is the index, else 0

All are exact on a range of columns: `start` is the global index of the first one, and an index outside gives zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshc.ops.definition import operator
from meshc.ops.operands import misfit


@operator("take", results=lambda x, *_: x.new_empty(x.shape[:-1]), fit=lambda x, index, *_: _fit_take(x, index))
def take(x: Tensor, index: Tensor, ignore: int, start: int = 0) -> Tensor:
    columns = x.shape[-1]
    local = index - start if start else index
    inside = (local >= 0) & (local < columns) & (index != ignore)
    picked = x.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, picked, 0.0)


def _fit_take(x: Tensor, index: Tensor) -> None:
    if x.dim() == 0 or index.shape != x.shape[:-1] or index.dtype != torch.int64:
        raise misfit("take", "index is int64 and has the shape of x without its last dim", x=x, index=index)


@operator(
    "take_backward",
    results=lambda grad, index, ignore, columns, *_: grad.new_empty((*grad.shape, columns)),
    fit=lambda grad, index, ignore, columns, *_: _fit_backward(grad, index, columns),
)
def take_backward(grad: Tensor, index: Tensor, ignore: int, columns: int, start: int = 0) -> Tensor:
    local = index - start if start else index
    inside = (local >= 0) & (local < columns) & (index != ignore)
    out = grad.new_zeros((*grad.shape, columns))
    return out.scatter_(-1, torch.where(inside, local, 0).unsqueeze(-1), torch.where(inside, grad, 0.0).unsqueeze(-1))


def _fit_backward(grad: Tensor, index: Tensor, columns: int) -> None:
    if grad.shape != index.shape or index.dtype != torch.int64 or columns < 0:
        rule = f"index is int64 and has the shape of grad, and {columns} columns are 0 or more"
        raise misfit("take_backward", rule, grad=grad, index=index)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, index, ctx.ignore, _ = inputs
    ctx.columns = x.shape[-1]
    ctx.save_for_backward(index)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    (index,) = ctx.saved_tensors
    return take_backward(grad, index, ctx.ignore, ctx.columns), None, None, None


def _setup_twice(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, index, ctx.ignore, *_ = inputs
    ctx.save_for_backward(index)


def _backward_twice(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = ctx.saved_tensors
    return take(grad, index, ctx.ignore), None, None, None, None


take.register_autograd(_backward, setup_context=_setup)
take_backward.register_autograd(_backward_twice, setup_context=_setup_twice)


@operator("one_hot", results=lambda index, columns, *_: index.new_empty((*index.shape, columns), dtype=torch.int64))
def one_hot(index: Tensor, columns: int, start: int = 0) -> Tensor:
    return (index.unsqueeze(-1) == torch.arange(start, start + columns, device=index.device)).to(torch.int64)


def raised_one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """As `torch.nn.functional.one_hot`; torch's own where the number of classes depends on the values."""
    return torch.nn.functional.one_hot(input, num_classes) if num_classes <= 0 else one_hot(input, num_classes)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `torch.nn.functional.cross_entropy`; torch's own for class weights, smoothing and target probabilities."""
    plain = weight is None and label_smoothing == 0.0 and size_average is None and reduce is None and not target.is_floating_point()
    if not plain:
        return torch.nn.functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    logits = input if input.dim() <= 2 else input.movedim(1, -1)
    loss = -take(torch.log_softmax(logits, -1), target, ignore_index)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (target != ignore_index).sum()
