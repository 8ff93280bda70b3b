"""Routed experts of stock `transformers` models in a form that shards: without sorting rows, or with dispatch to groups of experts.

    model:      sort all rows by expert, gather, products of runs, activation, products of runs, gather back, weigh, sum
    traced:     products of rows with the matrix of their expert, activation, the same, weigh, sum
    in groups:  to each group the rows that it has an expert for; there the same; the sum over the groups

All families have one class for the weights of their experts and choose among implementations of its forward by name, from a table that
`transformers` lets users extend. While a model is traced, this implementation replaces those for a CPU. Experts that axes are to split are
traced in so many groups, of one rank each (`meshc/ops/expert_groups.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from torch import Tensor

from meshc.errors import CaptureError
from meshc.frontend.expert_rows import FORM, ExpertForm, Layout, routed_sum
from meshc.replacements import replace_targets

REPLACED = ("grouped_mm", "batched_mm", "eager")
"""Equivalent implementations: grouped products, a matrix gathered for each row, a loop over the experts."""


def unsorted_experts() -> AbstractContextManager[None]:
    """A context in which stock experts take this form."""
    return replace_targets(experts=dict.fromkeys(REPLACED, forward))


class _StockExperts(Protocol):
    """The attributes of experts' modules that transformers' own forward reads."""

    _is_expert_parallel: bool
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    down_proj: Tensor
    down_proj_bias: Tensor
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]


def forward(self: _StockExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(tokens [t, hidden], experts of each [t, k], their weights [t, k]) -> [t, hidden], as `grouped_mm_experts_forward`.

    Rows are weighed before the last product, which is linear, if no norm follows it, nothing is promoted, and it does not round: split
    over the experts' hidden dim, the product's partial sums are then summed over k before ranks exchange them, and not kept for backward.
    """
    if self._is_expert_parallel:
        raise CaptureError(
            "transformers has already spread the experts of this model over ranks; "  # in one line, which the tracer's error quotes
            "what to do: build it without transformers' own expert parallelism, as on one device, and meshc splits it"
        )
    return routed_sum(partial(_experts_output, self), hidden_states, top_k_index, top_k_weights, self.down_proj.shape[0], self)


def _experts_output(self: _StockExperts, hidden_states: Tensor, routed: Layout) -> Tensor:
    """The experts' output for the tokens, weighed and summed."""
    weights = routed.weights
    made = _project(self, routed, routed.to(hidden_states), "gate_up_proj" if self.has_gate else "up_proj")
    made = self._apply_gate(made) if self.has_gate else self.act_fn(made)
    behind = getattr(self, FORM, ExpertForm()).behind or self.has_post_expert_norm
    if behind or made.dtype != weights.dtype or made.dtype != self.down_proj.dtype:
        made = _project(self, routed, made, "down_proj")
        made = self.post_expert_norm(made) if self.has_post_expert_norm else made
        return routed.back(made * weights).to(hidden_states.dtype)
    made = routed.back(routed.product(made * weights, _matrices(self, "down_proj")))
    if self.has_bias:
        made = made + routed.back(routed.bias(self.down_proj_bias) * weights)
    return made.to(hidden_states.dtype)


def _project(self: _StockExperts, routed: Layout, rows: Tensor, name: str) -> Tensor:
    made = routed.product(rows, _matrices(self, name))
    return made + routed.bias(getattr(self, f"{name}_bias")) if self.has_bias else made


def _matrices(self: _StockExperts, name: str) -> Tensor:
    """The experts' weights as [g, in, out]; untransposed they are [g, out, in]."""
    weight: Tensor = getattr(self, name)
    return weight if self.is_transposed else weight.transpose(-2, -1)
