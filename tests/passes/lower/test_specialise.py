"""Backward from some of the outputs: the specialised stage as text, and its gradients against torch's on simulated ranks."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.ir import record, spmd, trees
from meshc.passes.driver.compile_program import specialise_backward
from meshc.passes.lower.specialise import specialise
from meshc.program.program import PlainProgram
from meshc.runtime.simulator import reference_comparison
from meshc.runtime.simulator.simulation import simulate
from meshc.text.parse import parse_stage
from meshc.text.printer import hash_program, print_stage
from tests.broad import broad
from tests.models import FLOAT32_INSIDE, Case, llama, nanogpt
from tests.two_outputs import two_outputs

MESHES = (
    ("dp=2", None), ("dp=4", None), ("dp_shard=2", None), ("tp=2", None), ("dp=2,tp=2", "fsdp+megatron"), ("tp=3", "megatron_sp"),
)
"""Six rows over four ranks, four scores and twelve features over three: uneven too."""


BEFORE = """\
def backward(
    a: "f32[4]" = "tangent:a",
    b: "f32[4]" = "tangent:b",
    saved: "f32[4]" = "saved:root",
):
    div: "f32[4]" = aten.div.Tensor(a, saved)
    mul: "f32[4]" = aten.mul.Tensor(b, saved)
    add: "f32[4]" = aten.add.Tensor(div, mul)
    all_reduce_1: "f32[4]" = all_reduce(add, ["dp"], "sum")
    all_reduce_2: "f32[4]" = all_reduce(div, ["dp"], "sum")
    cat: "f32[8]" = aten.cat([div, mul])
    return {
        "gradient:both": all_reduce_1,
        "gradient:first": all_reduce_2,
        "gradient:joined": cat,
    }
"""
FROM_B = """\
def backward(
    b: "f32[4]" = "tangent:b",
    saved: "f32[4]" = "saved:root",
):
    mul: "f32[4]" = aten.mul.Tensor(b, saved)
    all_reduce_1: "f32[4]" = all_reduce(mul, ["dp"], "sum")
    full_default: "f32[4]" = aten.full([4], 0.0, dtype=f32, device=cpu, pin_memory=False)  # its output received no gradient
    cat: "f32[8]" = aten.cat([full_default, mul])
    return {
        "gradient:both": all_reduce_1,
        "gradient:joined": cat,
    }
"""


def test_text() -> None:
    """An addition keeps its other operand, a concatenation gets zeros, and what is behind `a` alone is gone."""
    stage = parse_stage(BEFORE)
    assert print_stage(specialise(stage, {"b"})) == FROM_B
    assert print_stage(specialise(stage, {"a", "b"})) == BEFORE == print_stage(stage)
    assert specialise(stage, set()).outputs == ()


def compiled(model: nn.Module, kwargs: dict[str, Tensor], mesh: str, plan: str | None = None) -> meshc.Program:
    return meshc.compile(model, meshc.Mesh(mesh), kwargs=kwargs, plan=plan)


def compare(
    program: meshc.Program, model: nn.Module, kwargs: dict[str, Tensor], outputs: tuple[str, ...], tolerance: float = 1e-9
) -> PlainProgram:
    """Gradients for backward from `outputs`, with seeded cotangents: those that torch gives, and no others."""
    made = specialise_backward(program.compiled, program.lowered, outputs)
    reference = reference_comparison.Reference(model, lambda module, **inputs: module(**inputs), (), kwargs)
    values = reference_comparison.input_values(made, reference, 0)
    generator = torch.Generator().manual_seed(3)
    ports = {name: made.port(f"tangent:{name}") for name in outputs}
    tangents = {name: torch.randn(port.shape, generator=generator, dtype=port.dtype) for name, port in ports.items()}
    values.update({f"tangent:{name}": value for name, value in tangents.items()})
    found = simulate(made, values)
    model.zero_grad(set_to_none=True)
    paths = [port.name for port in made.outputs if port.kind == "output"]
    results = dict(zip(paths, [leaf for leaf in trees.leaves(reference.call_model()) if isinstance(leaf, Tensor)], strict=True))
    torch.autograd.backward([results[name] for name in outputs], list(tangents.values()))
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {key.removeprefix("gradient:"): value for key, value in found.items() if key.startswith("gradient:")}
    assert gradients.keys() == wanted.keys(), outputs
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=tolerance, atol=tolerance, equal_nan=True)
    return made


@pytest.mark.parametrize("mesh, plan", MESHES)
@pytest.mark.parametrize("zero_row", [True, False])
def test_every_set_of_outputs(mesh: str, plan: str | None, zero_row: bool) -> None:
    model, x = two_outputs(zero_row=zero_row)
    program = compiled(model, {"x": x}, mesh, plan)
    for outputs in (("score",), ("length",), ("length", "score")):
        made = compare(program, model, {"x": x}, outputs)
        assert made.stages["forward"] is program.compiled.stages["forward"]
        assert set(made.stages["backward"].inputs) <= set(program.compiled.stages["backward"].inputs)


def test_the_other_output_s_infinite_derivative_is_not_computed() -> None:
    model, x = two_outputs()
    program = compiled(model, {"x": x}, "dp=2")
    compare(program, model, {"x": x}, ("score",))
    assert model.trunk.weight.grad is not None and model.trunk.weight.grad.isfinite().all()
    compare(program, model, {"x": x}, ("length",))
    assert model.trunk.weight.grad.isnan().any()


def test_what_is_not_needed_costs_no_collective() -> None:
    """Under ddp every gradient is reduced whole, and `left` and `right` have one: trunk 96 numbers, root 72, scale 1, head 48, left 4."""
    model, x = two_outputs()
    program = compiled(model, {"x": x}, "dp=2")
    sent = {}
    for outputs in (("length",), ("score",), ("length", "score")):
        made = specialise_backward(program.compiled, program.lowered, outputs)
        nodes = made.stages["backward"].graph.nodes
        sent[outputs] = sum(prod(record(node).shape) for node in nodes if node.target is spmd.all_reduce)
        assert [port.name for port in made.inputs if port.kind == "tangent"] == [*outputs]
    assert sent == {("length",): 96 + 72 + 1, ("score",): 96 + 48 + 4, ("length", "score"): 96 + 72 + 1 + 48 + 4}


@pytest.mark.parametrize(
    "make, mesh", [broad(llama, "dp_shard=2,tp=2"), (nanogpt, "cp=2"), broad(llama, "cp=2"), broad(nanogpt, "dp_shard=2,tp=2")]
)
def test_models_with_logits_and_a_loss(make: object, mesh: str) -> None:
    case: Case = make(torch.float64, layers=1)  # type: ignore[operator]
    program = compiled(case.model, case.kwargs, mesh)
    names = [port.name for port in program.compiled.inputs if port.kind == "tangent"]
    assert len(names) == 2, names
    for outputs in ((names[0],), (names[1],)):
        compare(program, case.model, case.kwargs, outputs, 1e-4 if case.name in FLOAT32_INSIDE else 1e-9)


def test_the_same_set_gives_the_same_program() -> None:
    model, x = two_outputs()
    program = compiled(model, {"x": x}, "dp=2,tp=2")
    one, two = (specialise_backward(program.compiled, program.lowered, {"score"}) for _ in range(2))
    assert hash_program(one) == hash_program(two) != hash_program(program.compiled)
    everything = specialise_backward(program.compiled, program.lowered, {"length", "score"})
    assert hash_program(everything) == hash_program(program.compiled)


def test_one_output_has_one_backward() -> None:
    model = nn.Linear(8, 4)
    program = compiled(model, {"input": torch.ones(2, 8)}, "dp=2")
    assert program.lowered.backward is None and specialise_backward(program.compiled, program.lowered, {"output"}) is program.compiled
