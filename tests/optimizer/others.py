"""Optimizers as their papers and other libraries write them, in plain torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule (Defazio et al., 2024), as `schedulefree.AdamWScheduleFree`: counts, weights and rates lie in the group."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.1, warmup_steps: int = 2) -> None:
        defaults = dict(lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, warmup_steps=warmup_steps)
        counts = dict(k=0, weight_sum=0.0, lr_max=-1.0, scheduled_lr=0.0, train_mode=False)
        super().__init__(params, {**defaults, **counts})

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["betas"][0])
                group["train_mode"] = True

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - 1 / group["betas"][0])
                group["train_mode"] = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.param_groups[0]["train_mode"]:
            raise Exception("Optimizer was not in train mode. Please insert .train() and .eval() calls on the optimizer.")
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            k = group["k"]
            scheduled = (k + 1) / group["warmup_steps"] if k < group["warmup_steps"] else 1.0
            correction = 1 - beta2 ** (k + 1)
            lr = group["scheduled_lr"] = group["lr"] * scheduled
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = lr_max**2
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            share = weight / weight_sum
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                z, square = state["z"], state["exp_avg_sq"]
                square.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                update = p.grad.div(square.div(correction).sqrt_().add_(group["eps"]))
                if group["weight_decay"] != 0:
                    update.add_(p, alpha=group["weight_decay"])
                p.lerp_(end=z, weight=share)
                p.add_(update, alpha=lr * (beta1 * (1 - share) - 1))
                z.sub_(update, alpha=lr)
            group["k"] = k + 1


class Shampoo(torch.optim.Optimizer):
    """A matrix for each dim, whose inverse root every few steps is made anew (Gupta, Koren, Singer, 2018)."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, eps: float = 1e-2, every: int = 2) -> None:
        super().__init__(params, dict(lr=lr, eps=eps, every=every))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, gradient = self.state[p], p.grad
                if not state:
                    state["step"] = 0
                    for dim, size in enumerate(p.shape):
                        state[f"matrix_{dim}"] = group["eps"] * torch.eye(size, dtype=p.dtype)
                        state[f"root_{dim}"] = torch.zeros(size, size, dtype=p.dtype)
                for dim, size in enumerate(p.shape):
                    gradient = gradient.transpose(0, dim).contiguous()
                    shape, matrix = gradient.shape, gradient.view(size, -1)
                    state[f"matrix_{dim}"].add_(matrix @ matrix.t())
                    if state["step"] % group["every"] == 0:
                        values, vectors = torch.linalg.eigh(state[f"matrix_{dim}"])
                        state[f"root_{dim}"].copy_((vectors * values.clamp(min=1e-12).pow(-0.5 / p.dim())) @ vectors.t())
                    gradient = (state[f"root_{dim}"] @ matrix).view(shape).transpose(0, dim)
                state["step"] += 1
                p.add_(gradient, alpha=-group["lr"])


class Soap(torch.optim.Optimizer):
    """Second moments in the basis of a matrix's eigenvectors, which a QR step follows (Vyas et al., 2024); vectors by their sign."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() != 2:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
                    continue
                state = self.state[p]
                if "L" not in state:
                    state["L"] = torch.diag(torch.arange(1, p.shape[0] + 1, dtype=p.dtype))
                    state["Q"] = torch.eye(p.shape[0], dtype=p.dtype)
                    state["v"] = torch.zeros_like(p)
                state["L"].lerp_(p.grad @ p.grad.T, 0.1)
                basis, _ = torch.linalg.qr(state["L"] @ state["Q"])
                state["Q"].copy_(basis)
                turned = basis.T @ p.grad
                state["v"].lerp_(turned.square(), 0.1)
                p.add_(basis @ (turned / (state["v"].sqrt() + 1e-8)), alpha=-group["lr"])


class Orthogonal(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) in the parameter's own precision, so that several steps can be compared."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02, steps: int = 5) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "steps": steps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(average, group["momentum"])
                wide = x.size(0) <= x.size(1)
                x = x if wide else x.T
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(group["steps"]):
                    gram = x @ x.T
                    x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
                p.mul_(1 - 0.1 * group["lr"])
                p.add_(x if wide else x.T, alpha=-group["lr"])


class AdamW8bit(torch.optim.Optimizer):
    """Moments in 8 bits with a scale a block (Dettmers et al., 2021), blocks of the flattened parameter as bitsandbytes has them."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, block: int = 4) -> None:
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.01, block=block))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, block = self.state[p], group["block"]
                if not state:
                    state["step"] = 0
                    for name in ("m", "v"):
                        state[name] = torch.zeros(p.numel() // block, block, dtype=torch.int8)
                        state[f"{name}_scale"] = torch.zeros(p.numel() // block, 1, dtype=p.dtype)
                state["step"] += 1
                m = _wide(state["m"], state["m_scale"]).reshape(p.shape).mul(beta1).add(p.grad, alpha=1 - beta1)
                v = _wide(state["v"], state["v_scale"]).reshape(p.shape).mul(beta2).addcmul(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                root = (v / (1 - beta2 ** state["step"])).sqrt().add(group["eps"])
                p.addcdiv_(m / (1 - beta1 ** state["step"]), root, value=-group["lr"])
                for name, value in (("m", m), ("v", v)):
                    rows = value.reshape(-1, block)
                    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12)
                    state[name].copy_((rows / scale * 127).round().to(torch.int8))
                    state[f"{name}_scale"].copy_(scale)


def _wide(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.to(scale.dtype) / 127 * scale


class Lamb(torch.optim.Optimizer):
    """Adam by layers' own norms (You et al., 2019), with a root in Python."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                rate = group["lr"] * math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
                update = state["m"] / state["v"].sqrt().add(1e-6)
                weight, size = p.norm().clamp(0, 10), update.norm()
                trust = 1 if weight == 0 or size == 0 else weight / size
                p.add_(update * trust, alpha=-rate)


class SignInKernel(torch.optim.Optimizer):
    """Stands for one whose step is a kernel of another library: it reads values in Python, and counts in itself."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, dict(lr=lr))
        self.launches = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.launches += 1
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["exp_avg"].sign(), alpha=-group["lr"] * (1.0 if p.isfinite().all().item() else 0.0))


def sign_update(p: Tensor, g: Tensor, state: Any, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What `SignInKernel` does to one parameter."""
    average = 0.9 * state["exp_avg"] + 0.1 * g
    return p - group["lr"] * average.sign(), {"exp_avg": average}


def sign_state(p: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": torch.zeros_like(p)}
