"""The peers' ways to hold less: a model whose layers run under `torch.utils.checkpoint`, as a careful user writes it.

    layer      backward makes all of a layer again
    selective  all but matrix products and attention, which a policy keeps (`create_selective_checkpoint_contexts`)
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

WAYS = ("layer", "selective")

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
}


def keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of `selective`."""
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed(model: nn.Module, layers: list[nn.Module], way: str | None) -> list[nn.Module]:
    """Wraps the layers in their model, in one of WAYS, or leaves them. Returns them as they then are."""
    if way is None:
        return layers
    asked = {"context_fn": partial(create_selective_checkpoint_contexts, keeps_products)} if way == "selective" else {}
    wrapped = {layer: checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, **asked) for layer in layers}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if child in wrapped:
                setattr(module, name, wrapped[child])
    return list(wrapped.values())
