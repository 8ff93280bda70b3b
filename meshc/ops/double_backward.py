"""Double backward of operators whose own backward is not differentiable: gradients by autograd through a decomposition.

    (g,) = torch.autograd.grad(energy, x, create_graph=True)        torch runs backward with gradients on: decomposed into torch operators
    loss.backward()                                                 and with gradients off: one operator
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_differentiated() -> bool:
    """Whether results need gradients in their turn, called within a backward."""
    return torch.is_grad_enabled()


def differentiable_gradients(
    function: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of `operands`, None for one that needs none, by autograd through `function`, whose operators are differentiable to any
    order. The same tensor may be several operands.
    """
    places = [None if x is None else x.view_as(x) for x in operands]
    made = [(one, grad) for one, grad in zip(function(*places), grads, strict=True) if grad is not None]
    wanted = [x for x in places if x is not None and x.requires_grad]
    found = torch.autograd.grad([one for one, _ in made], wanted, [grad for _, grad in made], create_graph=True, allow_unused=True)
    by_place = dict(zip(map(id, wanted), found, strict=True))
    return [by_place.get(id(x)) for x in places]
