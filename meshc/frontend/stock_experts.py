"""Routed experts of stock `transformers` models, written so that no row waits for another.

    model:     sort all rows by expert, gather, products of runs, activation, products of runs, gather back, weigh, sum
    traced:    products of rows with the matrix of their expert, activation, the same, weigh, sum

All families have one class for the weights of their experts and choose among implementations of its forward by name, from a table that
`transformers` offers for more. While a model is traced, this one stands for those that a CPU has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from meshc.errors import CaptureError
from meshc.ops.routed import routed_mm

REPLACED = ("grouped_mm", "batched_mm", "eager")
"""Implementations of one meaning: products of runs, a matrix gathered for each row, a loop over the experts."""


@contextmanager
def unsorted_experts() -> Iterator[None]:
    """Inside, stock experts take this form; without `transformers` nothing happens."""
    loaded = sys.modules.get("transformers.integrations.moe")
    if loaded is None:
        yield
        return
    table = loaded.ALL_EXPERTS_FUNCTIONS
    before = {name: table.get(name) for name in REPLACED}
    for name in REPLACED:
        table[name] = forward
    try:
        yield
    finally:
        for name, own in before.items():
            del table[name]
            if own is not None and table[name] is not own:  # someone's own entry, not the library's
                table[name] = own


class _Experts(Protocol):
    """What transformers' own forward of experts reads of their module."""

    _is_expert_parallel: bool
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    down_proj: Tensor
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]


def forward(self: _Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(tokens [t, hidden], experts of each [t, k], their weights [t, k]) -> [t, hidden], as `grouped_mm_experts_forward` has it.

    A row is weighed before the last product, which is linear, if no norm stands behind that and nothing is promoted: split over the
    experts' hidden dim, the product's pending sums are then added up over k before ranks exchange them, and are not kept for backward.
    """
    if self._is_expert_parallel:
        raise CaptureError(
            "transformers has already spread the experts of this model over ranks; "  # in one line: who traces quotes it
            "what to do: build it without transformers' own expert parallelism, as on one device, and meshc splits it"
        )
    tokens, chosen = top_k_index.shape
    choice, weights = top_k_index.reshape(-1), top_k_weights.reshape(-1, 1)
    rows = hidden_states.unsqueeze(1).expand(-1, chosen, -1).reshape(tokens * chosen, -1)
    up = "gate_up_proj" if self.has_gate else "up_proj"
    made = _product(self, up, rows, choice)
    made = made if not self.has_bias else made + _bias(self, up, choice)
    made = self._apply_gate(made) if self.has_gate else self.act_fn(made)
    if self.has_post_expert_norm or made.dtype != weights.dtype or made.dtype != self.down_proj.dtype:
        made = _product(self, "down_proj", made, choice)
        made = made if not self.has_bias else made + _bias(self, "down_proj", choice)
        made = self.post_expert_norm(made) if self.has_post_expert_norm else made
        return (made * weights).view(tokens, chosen, -1).sum(dim=1).to(hidden_states.dtype)
    made = _product(self, "down_proj", made * weights, choice).view(tokens, chosen, -1).sum(dim=1)
    if self.has_bias:
        made = made + (_bias(self, "down_proj", choice) * weights).view(tokens, chosen, -1).sum(dim=1)
    return made.to(hidden_states.dtype)


def _product(self: _Experts, name: str, rows: Tensor, choice: Tensor) -> Tensor:
    """Rows times the weights of their experts, [g, in, out] or, untransposed, [g, out, in]."""
    weight = getattr(self, name)
    matrices = weight if self.is_transposed else weight.transpose(-2, -1)
    return routed_mm(rows.to(matrices.dtype), matrices, choice)


def _bias(self: _Experts, name: str, choice: Tensor) -> Tensor:
    found: Tensor = getattr(self, f"{name}_bias")[choice]
    return found
