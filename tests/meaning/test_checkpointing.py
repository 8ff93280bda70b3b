"""`torch.utils.checkpoint` says how much is kept, never what is computed: the same values, gradients and draws with it and without."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import meshc
from meshc.errors import MeshcError
from meshc.frontend.reference_random import ReferenceRandom
from meshc.ir import calls, op_name, records
from tests.broad import broad
from tests.meaning.checks import MESHES, calls_alike, module_means_itself, step_means_itself
from tests.models import gpt2, llama

X = {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(1))}


region = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.Dropout(p)
        self.register_buffer("shift", torch.full((8,), 0.3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(x) + self.shift))) * scale


class Checkpointed(nn.Module):
    """Draws before, within, between and after the regions; one region within another, one that returns two tensors."""

    def __init__(self, p: float = 0.0, run: Any = region) -> None:
        super().__init__()
        self.first, self.second, self.drop, self.run = Block(p), Block(p), nn.Dropout(p), run

    def inner(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(self.run(self.second, x))
        return h + x, h.sum(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.run(self.first, self.drop(x), scale=2.0)
        y, total = self.run(self.inner, x)
        return self.drop(y), total


@pytest.mark.parametrize("p, mesh", [broad(0.0, MESHES[0]), (0.4, MESHES[1]), broad(0.0, MESHES[1]), broad(0.4, MESHES[0])])
def test_regions_mean_what_they_compute(p: float, mesh: str) -> None:
    torch.manual_seed(0)
    program = module_means_itself(Checkpointed(p), X, mesh)
    assert program.lowered.placed.traced.model.random_calls == (5 if p else 0)
    module_means_itself(Checkpointed(p), X, mesh, grad=False)
    step_means_itself(Checkpointed(p), X, mesh)


def direct(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.mark.parametrize("p", [0.4, broad(0.0)])
def test_the_program_is_the_one_without_checkpointing(p: float) -> None:
    torch.manual_seed(0)
    with_regions = Checkpointed(p)
    plain = copy.deepcopy(with_regions)
    plain.run = direct
    programs = [meshc.compile(model, meshc.Mesh("dp=2"), kwargs=X) for model in (with_regions, plain)]
    calls = [[str(node.target) for node in program.lowered.placed.graph.nodes if node.op == "call_function"] for program in programs]
    assert calls[0] == calls[1]


def recomputed(model: nn.Module, plan: str = "dp: batch", **options: Any) -> list[str]:
    """Products, activations and draws that backward recomputes, in a module in autograd and in a step alike, which mean what they mean."""
    model.double()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda output: output[0].square().mean())
    found = []
    for what in (model, step):
        given = {name: value.double() for name, value in X.items()}
        program = meshc.compile(what, meshc.Mesh("dp=2"), plan=plan, kwargs=given, options=meshc.Options(**options))
        meshc.verify(program, dtype=torch.float64)
        nodes = [node for stage in program.compiled.stages.values() for node in calls(stage.graph) if records(node)[0].again]
        found.append([name for node in nodes if (name := op_name(node)) in ("aten.addmm", "aten.gelu", "meshc.dropout")])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.broad
def test_a_region_is_recomputed_as_the_model_says_unless_the_plan_says_otherwise() -> None:
    """The last product of `first` is nobody's operand in backward; that of the second block is, of what is dropped next: where it is
    not recomputed, the mask is kept."""
    torch.manual_seed(0)
    assert recomputed(Checkpointed(0.4, direct)) == []
    inner = ["aten.addmm", "aten.gelu", "meshc.dropout"]
    assert recomputed(Checkpointed(0.4)) == [*inner, "aten.addmm", "meshc.dropout", *inner]
    assert recomputed(Checkpointed(0.4), remat="none") == recomputed(Checkpointed(0.4))
    assert recomputed(Checkpointed(0.4), "dp: batch\nremat first: none\nremat second: none") == []


def test_what_a_policy_saves_is_kept() -> None:
    torch.manual_seed(0)
    products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    again = recomputed(Checkpointed(0.4, partial(region, context_fn=products)))
    assert "aten.addmm" not in again and again.count("aten.gelu") == 2


def test_who_said_so() -> None:
    program = meshc.compile(Checkpointed(), meshc.Mesh("dp=2"), kwargs=X)
    assert "recomputed: the model, which checkpoints a region there" in str(program.explain("value:first.up"))


def test_a_policy_that_raises_is_named() -> None:
    def policy(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such operator")

    with pytest.raises(MeshcError, match="the policy of a checkpointed region raised ValueError: no such operator"):
        run = partial(region, context_fn=partial(create_selective_checkpoint_contexts, policy))
        meshc.compile(Checkpointed(0.0, run), meshc.Mesh("dp=2"), kwargs=X)


def test_a_call_on_a_real_rank() -> None:
    torch.manual_seed(0)
    calls_alike(Checkpointed(), X)


@pytest.mark.parametrize("make", [broad(llama), broad(gpt2)])
def test_gradient_checkpointing_of_transformers(make: Any) -> None:
    """GPT-2 with its stock dropout, attention's included."""
    case = make(batch=3, seq=7, layers=1)
    case.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1))
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=case.kwargs)
    assert meshc.verify(program, dtype=torch.float64).ok
    assert program.lowered.placed.traced.model.random_calls == (0 if make is llama else 4)


def test_the_reference_repeats_the_draws_of_a_region() -> None:
    torch.manual_seed(0)
    model = Checkpointed(0.4)
    plain = copy.deepcopy(model)
    plain.run = direct
    before = torch.get_rng_state()
    for one in (model, plain):
        with ReferenceRandom(3) as reference:
            sum(leaf.square().sum() for leaf in one(**X)).backward()
        assert reference.calls == 5
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_region_that_forgets_its_draws_is_refused_by_the_reference() -> None:
    model = Checkpointed(0.4, partial(region, preserve_rng_state=False))
    with ReferenceRandom(3), pytest.raises(MeshcError, match="preserve_rng_state=True"):
        model(**X)[0].sum().backward()
