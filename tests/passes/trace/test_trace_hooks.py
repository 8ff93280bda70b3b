"""Hooks of gradients, norms by group, gradients that are kept: against plain torch and on simulated ranks; what cannot be is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.frontend import clipping
from meshc.frontend.gradient_hooks import Drawing, hooks_of, share_hooks
from meshc.ops.random import seed_step
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.models import mlp, nanogpt

PLAN = {"dp": "dp: batch; store params, grads, state", "tp": "tp: ffn"}
MASK = (torch.arange(24) > 5).to(torch.float64)


def unit(parameter: Tensor) -> None:
    parameter.grad = parameter.grad / (parameter.grad.norm() + 1e-3)


def clamped(parameter: Tensor) -> None:
    parameter.grad.data.clamp_(-0.01, 0.01)


def noisy(gradient: Tensor) -> Tensor:
    return gradient + 0.1 * torch.randn_like(gradient)


def twice(gradient: Tensor) -> None:
    gradient.add_(torch.empty_like(gradient).normal_()).mul_(torch.rand_like(gradient))


def first(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.dim() == 2)


def compiled(model: nn.Module, mesh: str = "dp=2,tp=2", build: Any = torch.optim.AdamW, **more: Any) -> meshc.Program:
    options = meshc.Options(**more.pop("options", {}))
    step = meshc.TrainStep(model, optimizer=build(model.parameters(), lr=1e-2), loss=F.cross_entropy, **more)
    plan = "\n".join(PLAN[axis.name] for axis in meshc.Mesh(mesh).axes)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=mlp(torch.float64).call_kwargs, plan=plan, options=options)


def by_key(program: meshc.Program, model: nn.Module, step: int = 0, **state: Tensor) -> dict[str, Tensor]:
    """What a program takes: the model's parameters, the case's inputs, numbers as the optimizer has them, state of zeros."""
    case, parameters = mlp(torch.float64), dict(model.named_parameters())
    inputs = {"x": case.kwargs["x"], **case.target_kwargs}
    numbers = dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), (1e-2, 0.9, 0.999, 1e-8, 0.01), strict=True))
    found: dict[str, Tensor] = {}
    for port in program.compiled.inputs:
        if port.kind == "parameter":
            found[port.key] = parameters[port.name].detach()
        elif port.kind == "number":
            found[port.key] = torch.tensor(numbers[port.name.removeprefix("0.")], dtype=torch.float64)
        elif port.kind == "random":
            found[port.key] = seed_step(0, step)
        else:
            found[port.key] = inputs[port.name] if port.kind == "input" else state.get(port.key, torch.zeros(port.shape, dtype=port.dtype))
    return found


def backward(model: nn.Module) -> dict[str, Tensor]:
    """Plain torch, whose autograd runs the hooks; gradients add up."""
    case = mlp(torch.float64)
    F.cross_entropy(model(**case.kwargs), **case.target_kwargs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


HANG: dict[str, Callable[[nn.Module], Any]] = {
    "scaled": lambda m: first(m).register_hook(lambda g: 0.3 * g),
    "masked": lambda m: first(m).register_hook(lambda g: g * MASK),
    "two": lambda m: [first(m).register_hook(lambda g: g.clamp(-0.02, 0.02)), first(m).register_hook(lambda g: g + 1)],
    "in place": lambda m: first(m).register_hook(lambda g: g.mul_(0.5)),
    "of the parameter": lambda m: first(m).register_post_accumulate_grad_hook(clamped),
    "put in its place": lambda m: first(m).register_post_accumulate_grad_hook(unit),
    "both": lambda m: [first(m).register_post_accumulate_grad_hook(unit), first(m).register_hook(lambda g: g * g)],
}


@pytest.mark.parametrize("name", HANG)
def test_hooks_are_those_of_autograd(name: str) -> None:
    """The gradient that is kept of a step on four ranks is what plain torch leaves."""
    model = mlp(torch.float64).model
    HANG[name](model)
    twin = copy.deepcopy(model)
    HANG[name](twin)
    program = compiled(model, options={"keep_gradients": True})
    found = simulate(program.compiled, by_key(program, model))
    for parameter, wanted in backward(twin).items():
        torch.testing.assert_close(found[f"state:{parameter}/meshc.gradient"], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hook", [noisy, broad(twice)])
def test_noise_is_the_same_on_every_mesh(hook: Callable[[Tensor], Any]) -> None:
    """Draws of the step under the parameter's name, in microbatches too; another step draws otherwise."""
    model, wanted = mlp(torch.float64).model, mlp(torch.float64).model
    first(model).register_hook(hook)
    name = next(name for name, p in model.named_parameters() if p.dim() == 2)
    gradient = backward(wanted)[name]
    seen = []
    for mesh, microbatches, step in (("dp=2,tp=2", None, 0), ("dp=3", 2, 0), ("dp=3", 2, 1)):
        program = compiled(model, mesh, microbatches=microbatches, options={"keep_gradients": True})
        seen.append(simulate(program.compiled, by_key(program, model, step))[f"state:{name}/meshc.gradient"])
    with Drawing(name, seed_step(0, 0)):
        mine = gradient.clone()
        made = hook(mine)
    torch.testing.assert_close(seen[0], mine if made is None else made, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-10, atol=1e-12)
    assert (seen[2] - seen[0]).abs().max() > 1e-3 * seen[0].abs().max()


def test_a_step_with_hooks_and_norms_by_group_verifies() -> None:
    model = mlp(torch.float64).model
    first(model).register_hook(noisy)
    model.down.bias.register_post_accumulate_grad_hook(unit)  # type: ignore[union-attr, operator]
    program = compiled(model, clip_grad_norm={"up.*": 0.01, "down.*": 0.02}, microbatches=2)
    report = meshc.verify(program, dtype=torch.float64)
    assert "grad_norm" in [name for _, name, _ in report.rows] and report.worst < 1e-10


def test_gradients_of_calls_are_added_up() -> None:
    """Two calls that add, and one that steps: the norm is that of the sum, the step uses it, and the sum begins again at nothing."""
    model = mlp(torch.float64).model
    first(model).register_post_accumulate_grad_hook(clamped)
    twin = copy.deepcopy(model)
    first(twin).register_post_accumulate_grad_hook(clamped)
    step = compiled(model, clip_grad_norm=0.05, options={"accumulate": True, "keep_gradients": True})
    adds = meshc.Program(step.asked.having(adds=True), step.world)
    adds.prepare((), dict(mlp(torch.float64).call_kwargs))
    assert {port.kind for port in adds.compiled.outputs} == {"output", "metric", "state"}
    sums: dict[str, Tensor] = {}
    for _ in range(2):
        found = simulate(adds.compiled, by_key(adds, model, **sums))
        sums = {key: value for key, value in found.items() if key.endswith("/meshc.sum")}
        for name, wanted in backward(twin).items():
            torch.testing.assert_close(sums[f"state:{name}/meshc.sum"], wanted, rtol=1e-10, atol=1e-12)
    found = simulate(step.compiled, by_key(step, model, **sums))
    backward(twin)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
    torch.testing.assert_close(found["metric:grad_norm"], norm, rtol=1e-10, atol=1e-12)
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(found[f"state:{name}/meshc.gradient"], parameter.grad, rtol=1e-10, atol=1e-12)
        assert not found[f"state:{name}/meshc.sum"].any()
    assert meshc.verify(step, dtype=torch.float64).worst < 1e-10


class Looked(nn.Module):
    """A table of rows, whose gradient no operator has together with the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(x))
        return found


@pytest.mark.parametrize("build", [torch.optim.AdamW, broad(torch.optim.Adafactor)])
def test_a_sum_lies_alike_in_calls_that_step_and_in_those_that_do_not(build: Any) -> None:
    """Both programs read and write one buffer, so that the second to be loaded is refused if it wants another."""
    x = torch.arange(8)
    model = Looked()
    step = meshc.TrainStep(model, optimizer=build(model.parameters(), lr=1e-2), loss=F.cross_entropy)
    options = meshc.Options(training=meshc.Training(keep_gradients=True, accumulate=True))
    program = meshc.compile(step, meshc.Mesh("tp=2"), args=(x,), kwargs={"target": x}, options=options)
    adds = meshc.Program(program.asked.having(adds=True), program.world)
    adds.prepare((x,), {"target": x})
    wanted = {port.key: str(port.sharding) for port in program.compiled.inputs if port.kind == "state"}
    found = {port.key: str(port.sharding) for port in adds.compiled.inputs if port.kind == "state"}
    assert found == {key: wanted[key] for key in found}
    assert found["state:table.weight/meshc.sum"].startswith("[vocab 8/tp")


@pytest.mark.broad
def test_over_a_pipeline() -> None:
    """Hooks of parameters of two stages, gradients that are kept and summed."""
    case = nanogpt(torch.float64, hidden=16, seq=6)
    matrices = [p for p in case.model.parameters() if p.dim() == 2]
    for parameter in (matrices[1], matrices[-1]):
        parameter.register_hook(noisy)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters(), lr=1e-2), loss=case.loss)
    options = meshc.Options(training=meshc.Training(keep_gradients=True, accumulate=True))
    program = meshc.compile(step, meshc.Mesh("pp=2,dp=2"), kwargs=case.call_kwargs, options=options)
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10
    adds = meshc.Program(program.asked.having(adds=True), program.world)
    adds.prepare((), dict(case.call_kwargs))
    sums = [port.name for port in adds.compiled.outputs if port.kind == "state"]
    assert len(sums) == len(dict(case.model.named_parameters())) and all(name.endswith("/meshc.sum") for name in sums)


# What is refused.


def stepped_by_hand(parameter: Tensor) -> None:
    parameter.data.sub_(parameter.grad)


def steps(model: nn.Module) -> Any:
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    return first(model).register_post_accumulate_grad_hook(lambda p: other.step())


SEEN: list[Tensor] = []
REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "looks": (lambda m: first(m).register_hook(lambda g: SEEN.append(g.norm())), "leaves the gradient as it is"),
    "branches": (lambda m: first(m).register_hook(lambda g: g * 0 if g.isnan().any() else g), "could not be traced: DataDependent"),
    "returns": (lambda m: first(m).register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)), "returns something"),
    "writes": (lambda m: first(m).register_post_accumulate_grad_hook(stepped_by_hand), "writes to the parameter"),
    "steps": (steps, "a hook steps SGD"),
    "takes away": (lambda m: first(m).register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None)), "takes the gradient away"),
    "another shape": (lambda m: first(m).register_hook(lambda g: g.sum()), r"of a gradient that is torch.float64 \[40, 24\]"),
    "the model's own": (lambda m: first(m).register_hook(lambda g: g * m.norm.weight), "reads a parameter or a buffer of the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str) -> None:
    hang, words = REFUSED[name]
    model = mlp(torch.float64).model
    hang(model)
    with pytest.raises(meshc.CompileError, match=words) as caught:
        compiled(model)
    assert "what to do" in str(caught.value) or name in ("takes away", "returns")
    assert "test_trace_hooks.py" in str(caught.value) or name in ("steps", "the model's own")


def test_hooks_of_whole_modules_are_refused_with_advice() -> None:
    model = mlp(torch.float64).model
    model.up.register_full_backward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    with pytest.raises(meshc.CaptureError, match="parameter.register_hook"):
        compiled(model)


def test_hooks_hang_on_what_takes_a_parameters_place() -> None:
    old, new = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    assert hooks_of(old) is None
    handle = old.register_hook(lambda g: 2 * g)
    share_hooks(old, new)
    found = hooks_of(new)
    assert found is not None and found.numbers == (handle.id,) and "<lambda>" in found.names()
    new.sum().backward()
    assert new.grad is not None and new.grad.tolist() == [2, 2]
    handle.remove()
    assert hooks_of(new) is None


@pytest.mark.parametrize(
    "clip, words",
    [
        (-1.0, "the largest norm of all gradients, or a dict"),
        ({"up.*": "1"}, "the largest norm of all gradients, or a dict"),
        ({"ap.*": 1.0}, r"'ap.\*' names no parameter; the model has up.weight"),
        ({"up.*": 1.0, "*.bias": 1.0}, "up.bias: two patterns name it"),
    ],
)
def test_norms_that_are_none(clip: Any, words: str) -> None:
    with pytest.raises(meshc.PlanError, match=words):
        clipping.check(clip, ["up.weight", "up.bias", "down.weight"])
