"""Forward functions for stock layers of experts that are recognised by class, in the place of the layers' own while a model is traced.

    dbrx      its experts are rows of one matrix
    LongCat   some of its experts have no weights, and return their input
    Llama 4   every expert gets all tokens, times scores that are zero where it is not chosen: here a token goes to its chosen experts only
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from meshc.frontend.expert_rows import Layout, routed_sum
from meshc.frontend.traced_code import name_of

LLAMA4: Final = "transformers.models.llama4.modeling_llama4"
"""The module of Llama 4's classes."""


def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`DbrxExperts.forward`: the experts' matrices are stacked along dim 0 of one matrix."""
    mlp = self.mlp
    w1, v1, w2 = (each.view(self.num_experts, self.ffn_hidden_size, self.hidden_size) for each in (mlp.w1, mlp.v1, mlp.w2))
    x = hidden_states.reshape(-1, self.hidden_size)

    def expert_sum(x: Tensor, layout: Layout) -> Tensor:
        rows = layout.to(x)
        gate = mlp.activation_fn(layout.product(rows, w1.transpose(1, 2)))
        out = layout.product(gate * layout.product(rows, v1.transpose(1, 2)), w2)
        return layout.back(out * layout.weights)

    out = routed_sum(expert_sum, x, top_k_index, top_k_weights, self.num_experts, self)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`LongcatFlashExperts.forward`: choices from `num_routed_experts` on are experts without weights, which return their input. The first
    stack of weights has unused rows for them."""
    count = self.num_routed_experts
    own = top_k_index < count

    def expert_sum(x: Tensor, layout: Layout) -> Tensor:
        gate, up = layout.product(layout.to(x), self.gate_up_proj[:count].transpose(1, 2)).chunk(2, dim=-1)
        return layout.back(layout.product(self.act_fn(gate) * up, self.down_proj.transpose(1, 2)) * layout.weights)

    choice, weights = torch.where(own, top_k_index, -1), torch.where(own, top_k_weights, 0.0)
    out = routed_sum(expert_sum, hidden_states, choice, weights, count, self, some=True)
    given = hidden_states * torch.where(own, 0.0, top_k_weights).sum(-1, keepdim=True)
    return (out + given).to(hidden_states.dtype)


def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """`Llama4TextMoe.forward`. An expert's output for zeros is zeros, and so are its gradients. With another router than the stock one,
    whose scores may differ, the layer's own forward."""
    if name_of(type(self.router)) != f"{LLAMA4}.Llama4Router":
        whole: tuple[Tensor, Tensor] = type(self).forward(self, hidden_states)
        return whole
    tokens = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(tokens)
    choice = torch.topk(logits, self.top_k, dim=1)[1]  # as the router chooses
    return self.shared_expert(tokens) + self.experts(tokens, choice, scores.gather(1, choice)), logits


def _llama4_experts(self: Any, hidden_states: Tensor, choice: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
    """Experts' sums for tokens [t, h] and choices [t, k]; without choices, `Llama4TextExperts.forward` on all tokens for each expert."""
    if choice is None or weights is None:
        whole: Tensor = type(self).forward(self, hidden_states)
        return whole

    def expert_sum(x: Tensor, layout: Layout) -> Tensor:
        gate, up = layout.product(layout.to(x) * layout.weights, self.gate_up_proj).chunk(2, dim=-1)
        return layout.back(layout.product(up * self.act_fn(gate), self.down_proj))

    return routed_sum(expert_sum, hidden_states, choice, weights, self.num_experts, self)


KNOWN: Final[Mapping[str, Callable[..., Any]]] = {
    "transformers.models.dbrx.modeling_dbrx.DbrxExperts": _dbrx,
    "transformers.models.longcat_flash.modeling_longcat_flash.LongcatFlashExperts": _longcat,
    f"{LLAMA4}.Llama4TextMoe": _llama4,
    f"{LLAMA4}.Llama4TextExperts": _llama4_experts,
}
"""Full name of a module's class -> its forward while traced."""
ROUTERS: Final = (
    "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersTop1Router",
    "transformers.models.nllb_moe.modeling_nllb_moe.NllbMoeTop2Router",
)
"""Routers that cast a layer of theirs in forward."""
SWITCH: Final = "transformers.models.switch_transformers."
"""Models whose choices are one-hot rows from another module."""
