"""`meshc::take`: one entry a row, by index; cross-entropy written with it; and `meshc::one_hot`, its counterpart.

    take(x [rows..., columns], index [rows...], ignore) -> [rows...]      zero where index == ignore
    take_backward(grad [rows...], index [rows...], ignore, columns) -> [rows..., columns]
    one_hot(index [rows...], columns) -> [rows..., columns]                     1 where the column is the index, else 0

All are exact on a range of columns: `start` is the global index of the first one, and an index outside gives zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import operator, ops


@operator(
    "take", "x [..]", "x [.., columns], index:int64 [..]", rule="index is int64 and has the shape of x without its last dim",
    gradient=lambda grad, shape, index, ignore: ops.take_backward(grad, index, ignore, shape[-1]),
)  # fmt: skip
def take(x: Tensor, index: Tensor, ignore: int, start: int = 0) -> Tensor:
    columns = x.shape[-1]
    local = index - start if start else index
    inside = (local >= 0) & (local < columns) & (index != ignore)
    picked = x.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, picked, 0.0)


@operator(
    "take_backward", "grad [.., columns]", "grad [..], index:int64 [..], columns >= 0",
    rule="index is int64 and has the shape of grad, and {columns} columns are 0 or more",
    gradient=lambda grad, index, ignore: ops.take(grad, index, ignore),
)  # fmt: skip
def take_backward(grad: Tensor, index: Tensor, ignore: int, columns: int, start: int = 0) -> Tensor:
    local = index - start if start else index
    inside = (local >= 0) & (local < columns) & (index != ignore)
    out = grad.new_zeros((*grad.shape, columns))
    return out.scatter_(-1, torch.where(inside, local, 0).unsqueeze(-1), torch.where(inside, grad, 0.0).unsqueeze(-1))


@operator("one_hot", results=lambda index, columns: index.new_empty((*index.shape, columns), dtype=torch.int64))
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
