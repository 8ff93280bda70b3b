"""Double backward of operators whose own backward is not differentiable.

    (g,) = torch.autograd.grad(energy, x, create_graph=True)        torch runs backward with gradients on: what it makes is written out
    loss.backward()                                                 and with gradients off: one operator, as ever
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_differentiated() -> bool:
    """Whether what a backward makes, asked within it, is itself to have a gradient."""
    return torch.is_grad_enabled()


def written_out(
    function: Callable[..., Sequence[Tensor]], operands: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of operands, None for one that takes none, by what `function` makes of them in operators that have gradients of any order.

    Each operand counts by its place: one tensor may be several.
    """
    places = [None if x is None else x.view_as(x) for x in operands]
    made = [(one, grad) for one, grad in zip(function(*places), grads, strict=True) if grad is not None]
    wanted = [x for x in places if x is not None and x.requires_grad]
    found = torch.autograd.grad([one for one, _ in made], wanted, [grad for _, grad in made], create_graph=True, allow_unused=True)
    by_place = dict(zip(map(id, wanted), found, strict=True))
    return [by_place.get(id(x)) for x in places]
