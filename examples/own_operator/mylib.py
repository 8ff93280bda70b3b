"""A library of operators, as anybody may have one: torch knows them by name and not what they do, and so does meshc until it is told.

    my_rmsnorm      normalises rows; its gradient is an operator too
    my_gate         by element, and torch's own tag says so: no rule is needed
    my_update       an optimizer's update

Each has a fake, which says what shapes it makes, and its rule (docs/add-a-rule.md says what the letters mean).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import meshc

EPS = 1e-6


@torch.library.custom_op("mylib::my_rmsnorm", mutates_args=())
def my_rmsnorm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


@torch.library.custom_op("mylib::my_rmsnorm_backward", mutates_args=())
def my_rmsnorm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    normed, scaled = x * scale, grad * weight
    grad_x = scale * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return grad_x, (grad * normed).sum(list(range(x.dim() - 1)))


@torch.library.custom_op("mylib::my_gate", mutates_args=(), tags=(torch.Tag.pointwise,))
def my_gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@torch.library.custom_op("mylib::my_gate_backward", mutates_args=(), tags=(torch.Tag.pointwise,))
def my_gate_backward(grad: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return grad * gate * (1 + x * (1 - gate))


@torch.library.custom_op("mylib::my_update", mutates_args=())
def my_update(param: Tensor, grad: Tensor, momentum: Tensor, lr: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    momentum = torch.lerp(grad, momentum, beta.to(grad.dtype))
    return param - lr.to(param.dtype) * momentum / (1 + momentum.abs()), momentum


@my_rmsnorm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@my_rmsnorm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@my_gate.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@my_gate_backward.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


@my_update.register_fake
def _(param: Tensor, grad: Tensor, momentum: Tensor, lr: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(param), torch.empty_like(momentum)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


my_rmsnorm.register_autograd(lambda ctx, grad: my_rmsnorm_backward(grad, *ctx.saved_tensors), setup_context=_save)
my_gate.register_autograd(lambda ctx, grad: my_gate_backward(grad, *ctx.saved_tensors), setup_context=_save)

meshc.register_rule("mylib::my_rmsnorm", "... c!, c -> ... c")
meshc.register_rule("mylib::my_rmsnorm_backward", "... c!, ... c, c -> ... c | c +...")
meshc.register_rule("mylib::my_update", "..., ..., ..., , -> ... | ...")


class MyOptimizer(torch.optim.Optimizer):
    """Steps by a momentum that is held between -1 and 1. Numbers go in as tensors, so that a scheduler's new ones compile nothing."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            lr, beta = torch.as_tensor(group["lr"]), torch.as_tensor(group["beta"])
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                new, momentum = my_update(param, param.grad, state["momentum"], lr, beta)
                param.copy_(new)
                state["momentum"].copy_(momentum)
