"""An optimizer beside what is described of it: the same steps, compared after each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from meshc.optimizer import optimizer as mo

SHAPES = ((4, 3), (6,), (), (2, 3, 2))


def plain_call(op, *args, **kwargs):
    return op(*args, **kwargs)


def parameters(shapes=SHAPES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


class Shadow:
    """Steps beside a torch optimizer through `update_nodes`, never reading its state after the start."""

    def __init__(self, optimizer, call=plain_call):
        self.optimizer, self.call = optimizer, call
        self.spec = mo.describe(optimizer)
        self.live = [p for group in optimizer.param_groups for p in group["params"]]
        self.params = [p.detach().clone() for p in self.live]
        self.states = [{slot.name: slot.initial(p) for slot in self.spec.slots_of(p)} for p in self.live]

    def step(self, skip=()):
        if self.spec.key_of(self.optimizer) != self.spec.key:
            self.spec = mo.describe(self.optimizer)
        numbers = [{k: torch.tensor(v, dtype=torch.float64) for k, v in group.items()} for group in mo.numbers(self.optimizer)]
        for i, p in enumerate(self.live):
            if i in skip:
                continue
            group = self.spec.group_of(p)
            self.params[i], self.states[i] = mo.update_nodes(
                group, self.params[i], p.grad.clone(), self.states[i], numbers[group.index], self.call, like=p
            )

    def check(self, tolerance=1e-12):
        for i, p in enumerate(self.live):
            close(self.params[i], p.detach(), tolerance)
            for name, value in self.optimizer.state.get(p, {}).items():
                if value is not None:
                    value = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)
                    assert self.states[i][name].dtype == value.dtype, name
                    close(self.states[i][name], value, tolerance)


def close(a, b, tolerance):
    assert a.shape == b.shape and a.dtype == b.dtype
    scale = max(b.abs().max().item(), 1e-300) if b.numel() else 1.0
    assert b.numel() == 0 or (a - b).abs().max().item() <= tolerance * scale


def run(optimizer, steps=5, call=plain_call, change=lambda k: None, skip=lambda k: (), tolerance=1e-12):
    shadow = Shadow(optimizer, call)
    generator = torch.Generator().manual_seed(1)
    for k in range(steps):
        for i, p in enumerate(shadow.live):
            gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            p.grad = None if i in skip(k) else gradient
        change(k)
        shadow.step(skip(k))
        optimizer.step()
        shadow.check(tolerance)
    return shadow
