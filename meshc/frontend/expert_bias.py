"""Auxiliary-loss-free load balancing: a router's bias goes up where an expert had fewer tokens than the mean, and down where it had more.

    bias[i] += u * sign(mean(tokens) - tokens[i])            after a step; tokens of the whole batch, [experts]

Wang et al.: Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts (arXiv 2408.15664); DeepSeek-V3 (arXiv 2412.19437). Stock
models have the buffer, and leave its update to whoever trains them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from meshc.errors import PlanError
from meshc.frontend.expert_placement import is_stock

BIAS: Final = "e_score_correction_bias"
"""The buffer's name in stock models."""


def biases_of(model: nn.Module) -> dict[str, str]:
    """Path of a layer's experts -> the name of its router's bias, beside the experts or in the router, for each layer with such a bias."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if is_stock(module):
            around = path.rpartition(".")[0]
            count = module.get_parameter("down_proj").shape[0]
            below = model.get_submodule(around).named_buffers(prefix=around)
            names = [name for name, buffer in below if name.rpartition(".")[2] == BIAS and buffer.shape == (count,)]
            if len(names) == 1:
                found[path] = names[0]
    return found


def refuse_without_bias(model: nn.Module) -> None:
    """Raises PlanError for a model without such a buffer."""
    if not biases_of(model):
        raise PlanError(
            f"Options(experts=Experts(bias_update=)): no router of the model has a buffer {BIAS}, a number for each of its experts, such "
            "as those of DeepSeek V3 and GLM-4-MoE\n  what to do: leave the option out; what balances these experts is the model's own loss"
        )


def updated_bias(bias: Tensor, tokens: Tensor, step: float) -> Tensor:
    """The bias after a step. `tokens`: how many tokens have chosen each expert."""
    return bias + step * torch.sign(tokens.sum() - tokens * tokens.numel()).to(bias.dtype)


class ExpertCounts:
    """Counts of the choices of each expert, for a model on one device, between two `update`s."""

    def __init__(self, model: nn.Module, step: float) -> None:
        self.buffers, self.step = {path: model.get_buffer(name) for path, name in biases_of(model).items()}, step
        self.tokens = {path: torch.zeros(len(buffer), dtype=torch.int64) for path, buffer in self.buffers.items()}

    def count(self, path: str, experts: nn.Module, args: tuple[Any, ...]) -> None:
        """A hook before the forward of the experts at a path."""
        if torch.is_grad_enabled():  # in training
            self.tokens[path] += args[1].flatten().bincount(minlength=len(self.tokens[path]))

    def update(self) -> None:
        with torch.no_grad():
            for path, buffer in self.buffers.items():
                buffer.copy_(updated_bias(buffer, self.tokens[path], self.step))
                self.tokens[path].zero_()


@contextmanager
def count_choices(model: nn.Module, step: float | None) -> Iterator[ExpertCounts | None]:
    """A context in which the experts' choices of a model on one device are counted; yields None if `step` is None."""
    if step is None:
        yield None
        return
    counts = ExpertCounts(model, step)
    with ExitStack() as stack:
        for path in counts.buffers:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(counts.count, path))
            stack.callback(hook.remove)
        yield counts
