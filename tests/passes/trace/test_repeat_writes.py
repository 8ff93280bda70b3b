"""Buffers that a checkpointed region writes are as torch leaves them, which runs the region again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import meshc
from meshc.errors import CompileError
from tests.broad import broad

region = partial(checkpoint, use_reentrant=False)
whole = partial(checkpoint, use_reentrant=True)
saving = partial(region, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]))


class Model(nn.Module):
    """Two norms, a counter, an average of what passes, in a forward that is given."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first, self.second, self.run = nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.bn, self.other = nn.BatchNorm1d(4, momentum=momentum), nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("average", torch.ones(4))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()

    def block(self, x: Tensor) -> Tensor:
        return self.bn(self.first(x)).relu()

    def counted(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        out = self.second(x).sigmoid()
        self.average.lerp_(out.detach().mean(0), 0.25)  # behind the last call that keeps something
        return out


def nested(m: Model, x: Tensor) -> Tensor:
    return region(lambda t: m.other(region(m.block, t)) * t, x)


def between(m: Model, x: Tensor) -> Tensor:
    h = m.counted(x).relu()
    return m.counted(h)


FORWARDS: dict[str, tuple[Callable[[Model, Tensor], Tensor], dict[str, int]]] = {
    "region": (lambda m, x: region(m.block, x), {"bn.num_batches_tracked": 2}),
    "reentrant": (lambda m, x: whole(lambda t: m.counted(m.block(t)), m.second(x)), {"bn.num_batches_tracked": 2, "seen": 2}),
    "nested": (nested, {"bn.num_batches_tracked": 3, "other.num_batches_tracked": 2}),
    "one norm in two regions": (lambda m, x: region(m.block, region(lambda t: m.bn(t).tanh(), x)), {"bn.num_batches_tracked": 4}),
    "in a region and outside": (lambda m, x: region(m.block, m.bn(x)), {"bn.num_batches_tracked": 3}),
    "behind what is kept": (lambda m, x: region(m.counted, x), {"seen": 2}),
    "between what is kept": (lambda m, x: region(partial(between, m), x), {"seen": 4}),
    "a policy": (lambda m, x: saving(m.block, x), {"bn.num_batches_tracked": 2}),
    "instance norm, which is stopped in": (lambda m, x: region(lambda t: m.instance(m.first(t).unflatten(0, (2, 4))), x), {}),
    "instance norm": (lambda m, x: region(lambda t: m.instance(m.first(t).unflatten(0, (2, 4))).sin(), x), {}),
    "without a gradient": (lambda m, x: region(m.block, x).detach() + m.second(x), {"bn.num_batches_tracked": 1}),
    "unread": (lambda m, x: (region(m.block, x), m.second(x))[1], {"bn.num_batches_tracked": 1}),
}


def step(model: nn.Module, x: Tensor, mesh: str = "dp=2", **options: Any) -> meshc.Program:
    made = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out: out, **options)
    return meshc.compile(made, meshc.Mesh(mesh), args=(x,))


def numbers(rows: int = 8) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, 4, dtype=torch.float64) * 2 + 1


@pytest.mark.parametrize("name", [name if index < 6 else broad(name) for index, name in enumerate(FORWARDS)])
def test_buffers_are_as_torch_leaves_them(name: str) -> None:
    """Each count is torch's own; the program's buffers, in three steps, are those of the model."""
    forward, counts = FORWARDS[name]
    x, model = numbers(), Model(forward)
    assert meshc.verify(step(model, x), dtype=torch.float64).ok
    model(x).backward()
    assert {key: int(model.get_buffer(key)) for key in counts} == counts


def test_norms_that_average_over_calls() -> None:
    """Each of the two calls is one of those that are averaged over."""
    assert meshc.verify(step(Model(FORWARDS["region"][0], momentum=None), numbers()), dtype=torch.float64).ok


def test_a_step_that_is_a_mean_of_its_parts() -> None:
    """Both runs of a microbatch come before those of the next."""
    program = step(Model(FORWARDS["region"][0]), numbers(16), microbatches=2, batch_mix="mean_of_parts")
    assert meshc.verify(program, dtype=torch.float64).ok


def test_a_module_that_is_called() -> None:
    """Under autograd a call writes twice; in evaluation, and without gradients, as often as the model."""
    x, model = numbers(), Model(FORWARDS["region"][0])
    for train, grad in ((True, True), (True, False), (False, True)):
        model.train(train)
        with torch.set_grad_enabled(grad):
            assert meshc.verify(meshc.compile(model, meshc.Mesh("dp=2"), args=(x,)), dtype=torch.float64).ok


def test_equal_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.gelu(self.norm(self.linear(x)))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(7))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = region(layer, x)
            return x.square().mean()

    program = step(Stack().double(), numbers(), "dp=2,tp=2")
    assert meshc.verify(program, dtype=torch.float64).ok


def test_a_region_that_depends_on_what_it_writes_is_refused_by_its_line() -> None:
    """torch's gradients would be those of another function than forward's."""

    def forward(m: Model, x: Tensor) -> Tensor:
        def inside(t: Tensor) -> Tensor:
            m.average.mul_(0.5)
            return m.first(t) * m.average

        return region(inside, x)

    with pytest.raises(CompileError, match="depend") as caught:
        step(Model(forward), numbers())
    assert "test_repeat_writes.py" in str(caught.value) and "m.first(t) * m.average" in str(caught.value)


def test_a_reentrant_region_whose_inputs_take_no_gradient_is_refused() -> None:
    """torch gives its parameters none; where they are frozen, or something that goes in takes one, all is well."""
    x = numbers()
    with pytest.raises(CompileError, match=r"none of the inputs[\s\S]*test_repeat_writes\.py:\d+[\s\S]*use_reentrant=False"):
        step(Model(lambda m, x: m.second(whole(m.first, x))), x)
    frozen = Model(lambda m, x: m.second(whole(m.first, x)))
    frozen.first.requires_grad_(False)
    assert meshc.verify(step(frozen, x), dtype=torch.float64).ok
