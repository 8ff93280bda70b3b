"""`torch.nn.functional.embedding_bag` with bags of one size: an embedding and a reduction, which split as such."""

from __future__ import annotations

import torch
from torch import Tensor

functional = torch.nn.functional


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """As torch's. Bags of unequal sizes (`offsets`), their maximum, and calls that change rows use torch's own function."""
    if input.dim() != 2 or mode == "max" or max_norm is not None or scale_grad_by_freq or input.shape[1] == 0:
        return functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset,
            padding_idx,
        )  # fmt: skip
    rows = functional.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    kept = input != padding_idx % weight.shape[0]
    total = torch.where(kept.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device)).sum(1)
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)
