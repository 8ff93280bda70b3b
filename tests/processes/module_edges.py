"""What loops do around a compiled module in unusual turns, on real ranks, against the plain model: each function is one check on tp=2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from tests.processes.module_mode import same_gradients
from tests.processes.session import run_checks

X = torch.linspace(-1, 2, 48, dtype=torch.float64).reshape(6, 8)


class Both(nn.Module):
    """With its head, or what comes before it; attention's products taken apart into heads, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.up, self.head = (nn.Linear(8, 16).double(), nn.Linear(16, 12).double(), nn.Linear(12, 4).double())

    def forward(self, x: Tensor, features: bool = False, query: bool = False) -> Tensor:
        if query:
            return self.q(x)
        heads = self.q(x).unflatten(-1, (4, 4))
        mixed = torch.softmax(heads @ heads.mT, -1) @ heads
        hidden = self.up(mixed.flatten(-2)).relu()
        return hidden if features else self.head(hidden)


def pair(mesh: Any, make: Callable[[], nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    meshc.compile(model, mesh, args=(X,))
    return model, twin


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine.detach(), theirs.detach())


def parts_of_a_forward(mesh: Any) -> None:
    """Programs that leave modules out, for which factors of what they share have other names, or are not told apart."""
    model, twin = pair(mesh, Both)
    for how in ({}, {"features": True}, {"query": True}):
        for one in (model, twin):
            one.zero_grad()
            one(X, **how).square().sum().backward()
        close(model(X, **how), twin(X, **how))
        same_gradients(model, twin)
    for one in (model, twin):
        one.head = nn.Identity()
    close(model(X), twin(X))


def hooks_around_it(mesh: Any) -> None:
    """They see what is passed by position, whether they come before compiling or after it."""
    model, twin = pair(mesh, plain)
    for one in (model, twin):
        one.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        one.register_forward_hook(lambda _, args, output: output + args[0].sum())
    close(model(X), twin(X))
    close(model(X[:4]), twin(X[:4]))
    for one in (model, twin):
        one(X).sum().backward()
    same_gradients(model, twin)


def written_outputs(mesh: Any) -> None:
    """Logits are divided where they lie; of what backward reads that is refused, as of a plain model."""
    model, twin = pair(mesh, plain)
    for one in (model, twin):
        logits = one(X)
        logits /= 2
        logits[0] = 0
        torch.nn.functional.cross_entropy(logits, torch.arange(6) % 4).backward()
    same_gradients(model, twin)
    model, _ = pair(mesh, lambda: nn.Sequential(plain(), nn.Sigmoid()))
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(X).mul_(2)


def written_before_backward(mesh: Any) -> None:
    """A parameter or an input that is changed between a call and its backward would give gradients of another call."""
    model, twin = pair(mesh, plain)
    for write, name in ((lambda x: model[2].weight.mul_(2), "2.weight"), (lambda x: x.mul_(2), "input")):
        x = X.clone()
        loss = model(x).square().sum()
        with torch.no_grad():
            write(x)
        with pytest.raises(meshc.StateError, match=rf"changed in place between this call and its backward.*: {name}"):
            loss.backward()
    with torch.no_grad():
        twin[2].weight.mul_(2)
    for one in (model, twin):
        one.zero_grad()
        first, second = one(X).square().sum(), one(X).sum()
        first.backward()
        second.backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    same_gradients(model, twin)
    close(model(X), twin(X))


def anomalies(mesh: Any) -> None:
    model, twin = pair(mesh, plain)
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        for one in (model, twin):
            one(X).sum().backward()
    same_gradients(model, twin)
    with torch.autograd.set_detect_anomaly(True), pytest.raises(meshc.StateError, match="check_nan=False"):
        model(X).sum().backward()


def models_that_share(mesh: Any) -> None:
    """A parameter of two models that are compiled by themselves would be two from then on."""
    one, other, around = plain(), plain(), nn.Sequential()
    other[0].weight = one[0].weight
    around.append(one)
    meshc.compile(one, mesh, args=(X,))
    with pytest.raises(meshc.StateError, match=r"(?s)of a model that is compiled already \(Sequential\): 0.weight\n.*one nn.Module"):
        meshc.compile(other, mesh, args=(X,))
    with pytest.raises(meshc.StateError, match=r"\(Sequential\): 0.0.weight, 0.0.bias"):
        meshc.compile(around, mesh, args=(X,))


def model_of_a_step(mesh: Any) -> None:
    """A TrainStep's model, called: evaluation, and gradients of its own, over what the step trains. `names` and sizes that the step has of
    its loss's inputs are none of the model's."""
    torch.manual_seed(0)
    model, target = plain(), torch.linspace(0, 1, 24, dtype=torch.float64).reshape(6, 4)
    twin = copy.deepcopy(model)
    step, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    program = meshc.compile(
        meshc.TrainStep(model, optimizer=step, loss=lambda y, target: (y - target).square().sum()), mesh,
        names={"input": ("rows", None), "target": ("rows", None)}, options=meshc.Options(training=meshc.Training(keep_gradients=True)),
    )  # fmt: skip
    for turn in range(2):
        program(X, target=target)
        (twin(X) - target).square().sum().backward()
        other.step()
        other.zero_grad()
        with torch.no_grad():
            close(model(X + turn), twin(X + turn))
    for one in (model, twin):
        one.zero_grad()
        one(X).sum().backward()
    same_gradients(model, twin)
    own = meshc.compile(model, mesh, args=(X,))  # what is compiled is what runs from then on
    close(model(X), twin(X))
    assert vars(model)["_compiled_call_impl"].__self__ is own


CHECKS = (parts_of_a_forward, hooks_around_it, written_outputs, written_before_backward, anomalies, models_that_share, model_of_a_step)


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
