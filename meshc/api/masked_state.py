"""State with weights as products read them under sparse lines: what `torch.sparse.to_sparse_semi_structured` takes, of 2:4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers operators
from meshc.optimizer.spec import MASK

Groups = Mapping[str, list[int]]
"""By parameter: n, m, and the dim along which its groups of m are."""


def mask_state(state: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """`state` with zeros in the weights of its `model` where their masks are: those that a step has left, else of the n largest of each
    group."""
    model, hidden = dict(state.get("model", {})), state.get("meshc", {}).get("hidden", {})
    for name, (n, m, dim) in groups.items():
        if name in model:
            apart = model[name].detach().unflatten(dim, (-1, m))
            mask = hidden.get(f"{name}/{MASK}")
            mask = torch.zeros_like(apart, dtype=torch.bool) if mask is None else mask.unflatten(dim, (-1, m))
            kept = torch.where(mask.any(dim + 1, keepdim=True), mask, torch.ops.meshc.is_largest(apart, n, dim + 1))
            model[name] = torch.where(kept, apart, 0.0).flatten(dim, dim + 1)
    return {**state, "model": model} if "model" in state else dict(state)
