"""State with weights as products read them under sparse lines: what `torch.sparse.to_sparse_semi_structured` takes, of 2:4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers operators

Groups = Mapping[str, list[int]]
"""By parameter: n, m, and the dim along which its groups of m are."""


def mask_state(state: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """`state` with the n largest of each group in the weights of its `model`, and zeros in the place of the others."""
    model = dict(state.get("model", {}))
    for name, (n, m, dim) in groups.items():
        if name in model:
            apart = model[name].detach().unflatten(dim, (-1, m))
            model[name] = torch.ops.meshc.keep_largest(apart, n, dim + 1).flatten(dim, dim + 1)
    return {**state, "model": model} if "model" in state else dict(state)
