"""A compiled module that takes part in autograd, on real ranks: each function is one check, run on the mesh dp=2 (or dp=2,tp=2)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshc
from meshc.frontend.reference_random import ReferenceRandom
from tests.cache_name import CACHE
from tests.models import llama, mlp, nanogpt, vit
from tests.processes.reference import SEED, close, furthest
from tests.processes.session import run_checks
from tests.two_outputs import two_outputs

OPTIONS = meshc.Options(seed=SEED)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def three_steps(mesh: Any) -> None:
    """The user's own loop, optimizer and clipping, on DTensors."""
    case = llama(torch.float64, layers=1)
    twin = copy.deepcopy(case.model)
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs, options=OPTIONS)
    ours = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for _ in range(3):
        output = program(**case.kwargs)
        wanted = twin(**case.kwargs)
        assert type(output) is type(wanted)
        output.loss.backward()
        wanted.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.5)
        wanted_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        close([output.loss.item(), whole(norm).item()], [wanted.loss.item(), wanted_norm.item()], 1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = program.state_dict(full=True)
    if dist.get_rank() == 0:
        worst, name = furthest(state["model"], twin.state_dict())
        assert worst < 1e-4, (worst, name)


def several_calls_and_backwards(mesh: Any) -> None:
    """Two calls before either backward; no_grad between; backward from one output of two; gradients add up."""
    case = nanogpt(torch.float64, layers=1, dropout=0.1)
    twin = copy.deepcopy(case.model)
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs, options=OPTIONS)
    other = {"idx": case.kwargs["targets"], "targets": case.kwargs["idx"]}

    def reference(kwargs: dict[str, Tensor], step: int) -> tuple[Tensor, Tensor]:
        with ReferenceRandom(SEED, step):
            return twin(**kwargs)

    first, second = program(**case.kwargs), program(**other)
    with torch.no_grad():
        silent = program(**case.kwargs)
    assert not silent[1].requires_grad and first[1].requires_grad
    wanted = reference(case.kwargs, 0), reference(other, 1), reference(case.kwargs, 2)
    close([loss.item() for _, loss in (first, second, silent)], [loss.item() for _, loss in wanted], 1e-10)
    second[1].backward()
    first[1].backward()
    wanted[0][1].backward()
    wanted[1][1].backward()
    assert furthest(gradients(case.model), gradients(twin))[0] < 1e-9
    logits, loss = program(**case.kwargs)
    more_logits, more_loss = reference(case.kwargs, 3)
    (logits.square().mean() + 2 * loss).backward()
    (more_logits.square().mean() + 2 * more_loss).backward()
    assert furthest(gradients(case.model), gradients(twin))[0] < 1e-9
    logits, loss = program(**case.kwargs)
    more_logits, more_loss = reference(case.kwargs, 4)
    logits[:, 0].sum().backward()
    more_logits[:, 0].sum().backward()
    assert furthest(gradients(case.model), gradients(twin))[0] < 1e-9


def some_outputs(mesh: Any) -> None:
    """Backward from one output of two, where the other's derivative is infinite: finite gradients, and none where torch has none."""
    model, x = two_outputs()
    twin = copy.deepcopy(model)
    program = meshc.compile(model, mesh, kwargs={"x": x})
    ours, theirs = program(x=x), twin(x=x)
    assert torch.allclose(ours["score"], theirs["score"], atol=1e-12)
    for outputs in (ours, theirs):
        outputs["score"].square().sum().backward(retain_graph=True)
    assert model.trunk.weight.grad is not None and whole(model.trunk.weight.grad).isfinite().all()
    same_gradients(model, twin)
    assert model.scale.grad is None and model.root.weight.grad is None and model.unused.weight.grad is None
    model.left.grad.mul_(2)  # in memory of its own, although `right` has the same gradient
    twin.left.grad.mul_(2)
    same_gradients(model, twin)
    for outputs in (ours, theirs):
        outputs["score"].sum().backward()  # once more into .grad
    same_gradients(model, twin)
    for module in (model, twin):
        module.zero_grad()
    ours["length"].sum().backward()
    twin(x=x)["length"].sum().backward()
    assert model.left.grad is None and whole(model.scale.grad).isfinite() and whole(model.trunk.weight.grad).isnan().any()
    same_gradients(model, twin)
    sent = [sorted(received) for received in next(iter(program.compilations.kept.values())).session.backwards.programs]
    assert sent == [["length", "score"], ["score"], ["length"]], sent


class NoGradient(torch.autograd.Function):
    """Gives nothing back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def no_output(mesh: Any) -> None:
    """Torch asks for backward although no output has a gradient: nothing happens, with one output and with two."""
    model, x = two_outputs()
    program = meshc.compile(model, mesh, kwargs={"x": x})
    NoGradient.apply(program(x=x)["score"]).sum().backward()
    case = mlp(torch.float64)
    NoGradient.apply(meshc.compile(case.model, mesh, kwargs=case.kwargs)(**case.kwargs)).sum().backward()
    assert gradients(model) == {} and gradients(case.model) == {}


def several_sets(mesh: Any) -> None:
    """Two calls before backward, each from another set of outputs, then both sets again in another order, then both outputs together."""
    model, x = two_outputs(zero_row=False)
    twin = copy.deepcopy(model)
    program = meshc.compile(model, mesh, kwargs={"x": x})
    y = x.flip(0) * 0.5
    for one, two in (("score", "length"), ("length", "score")):
        for call in (program, twin):
            first, second = call(x=x), call(x=y)
            second[two].square().sum().backward()
            first[one].square().sum().backward()
        same_gradients(model, twin)
    for call in (program, twin):
        outputs = call(x=x)
        (outputs["score"].square().sum() + outputs["length"].sum()).backward()
    same_gradients(model, twin)


def same_gradients(model: nn.Module, twin: nn.Module) -> None:
    mine, wanted = gradients(model), gradients(twin)
    assert mine.keys() == wanted.keys(), mine.keys() ^ wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-9, atol=1e-9, equal_nan=True)


def gradients_of_inputs(mesh: Any) -> None:
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    x = case.kwargs["x"].clone().requires_grad_()
    y = case.kwargs["x"].clone().requires_grad_()
    program = meshc.compile(case.model, mesh, args=(x,))
    program(x).square().sum().backward()
    twin(y).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-12)
    case.model.down.bias.requires_grad_(False)
    case.model.zero_grad()
    program(x).sum().backward()
    assert case.model.down.bias.grad is None and case.model.up.bias.grad is not None


def refusals(mesh: Any) -> None:
    """What raises, on every rank alike, and what the messages say."""
    case = mlp()
    early = torch.optim.SGD(case.model.parameters(), lr=0.1)
    with pytest.raises(meshc.StateError, match=r"meshc.compile\(model, mesh, kwargs="):
        meshc.compile(case.model, mesh)
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs)
    program(**case.kwargs).sum().backward()
    with pytest.raises(meshc.StateError, match="build the optimizer after meshc.compile"):
        early.step()
    case.model(**case.kwargs).sum().backward()  # the live model runs its program; a TrainStep's one over what the step trains
    case = mlp()
    twin = copy.deepcopy(case.model)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=torch.sum)
    meshc.compile(step, mesh, kwargs=case.kwargs)
    torch.testing.assert_close(case.model(**case.kwargs).detach(), twin(**case.kwargs).detach())


def outputs_as_they_lie(mesh: Any) -> None:
    """outputs="dtensor", DTensors going in, and backward through both."""
    case = mlp(torch.float64)
    twin = copy.deepcopy(case.model)
    program = meshc.compile(case.model, mesh, kwargs=case.kwargs, outputs="dtensor")
    output = program(**case.kwargs)
    assert isinstance(output, DTensor) and any(place.is_shard() for place in output.placements), output
    wanted = twin(**case.kwargs)
    assert torch.allclose(whole(output), wanted, atol=1e-12)
    output.sum().backward()
    wanted.sum().backward()
    assert furthest(gradients(case.model), gradients(twin))[0] < 1e-9
    split = torch.distributed.tensor.distribute_tensor(case.kwargs["x"], mesh, [torch.distributed.tensor.Shard(0)] * mesh.ndim)
    assert torch.allclose(whole(program(x=split)), wanted, atol=1e-12)


def two_programs(mesh: Any) -> None:
    """A second program of the same model, for evaluation, sees what the first has trained."""
    case = vit(torch.float64, layers=1)
    train = meshc.compile(
        meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1)), mesh, kwargs=case.kwargs, options=OPTIONS
    )
    images = {"pixel_values": case.kwargs["pixel_values"]}
    with torch.no_grad():
        case.model.eval()
        evaluate = meshc.compile(case.model, mesh, kwargs=images)
        before = evaluate(**images).logits
        case.model.train()
        train(**case.kwargs)
        case.model.eval()
        after = evaluate(**images).logits
        assert torch.equal(case.model(**images).logits, after)  # the live model runs the program that is its own
    assert not torch.equal(before, after)
    state = train.state_dict(full=True)
    fresh = vit(torch.float64, layers=1).model.eval()
    if dist.get_rank() == 0:
        fresh.load_state_dict(state["model"])
        assert torch.allclose(fresh(**images).logits, after, atol=1e-10)


def caches(mesh: Any) -> None:
    """A stock model with its cache on: the cache comes back as it lies, and has no gradient."""
    case = llama(torch.float64, layers=1)
    twin = copy.deepcopy(case.model)
    ids = {"input_ids": case.kwargs["input_ids"]}
    program = meshc.compile(case.model, mesh, kwargs=ids)
    output, wanted = program(**ids), twin(**ids)
    assert type(output[CACHE]) is type(wanted[CACHE])
    mine, theirs = output[CACHE].layers[0], wanted[CACHE].layers[0]
    assert isinstance(mine.keys, DTensor) and not mine.keys.requires_grad
    assert torch.allclose(whole(mine.keys), theirs.keys, atol=1e-5) and torch.allclose(whole(mine.values), theirs.values, atol=1e-5)
    assert torch.allclose(output.logits, wanted.logits, atol=1e-5)


CHECKS: tuple[Callable[[Any], None], ...] = (
    three_steps, several_calls_and_backwards, some_outputs, no_output, several_sets, gradients_of_inputs, refusals,
    outputs_as_they_lie, two_programs, caches,
)  # fmt: skip


def run(mesh: str, *names: str) -> None:
    run_checks(CHECKS, mesh, names)
