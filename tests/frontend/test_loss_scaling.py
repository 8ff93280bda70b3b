"""Loss scaling: a step is that of torch's loop with its GradScaler, on every mesh, whether it is skipped or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

import meshc
from meshc.frontend import loss_scaling
from meshc.ir import record, spmd
from meshc.ir.graph import copy_graph
from meshc.proof.erasure import erase
from meshc.runtime.simulator.simulation import simulate
from meshc.text.printer import hash_program
from tests.passes.depth.stacks import Stack, cross_entropy
from tests.proof.edited_lines import put

aten, ours = torch.ops.aten, torch.ops.meshc

OVER = 2.0**120
"""A scale by which float32 gradients of the steps below are infinite."""


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 7)).to(dtype)


def scaler(**ask: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1000.0, "growth_interval": 1, "growth_factor": 1.5, **ask})


def step(mesh: str, plan: str | None = None, kind: Any = torch.optim.AdamW, large: float = 1.0, **ask: Any) -> meshc.Program:
    model = ask.pop("model", None) or made()
    ask = {"scaler": scaler(), **ask}
    options = ask.pop("options", meshc.Options())
    train = meshc.TrainStep(model, optimizer=kind(model.parameters()), loss=F.mse_loss, **ask)
    x, target = large * torch.randn(12, 12, generator=torch.manual_seed(1)), torch.randn(12, 7, generator=torch.manual_seed(2))
    return meshc.compile(train, meshc.Mesh(mesh), args=(x,), kwargs={"target": target}, plan=plan, options=options)


MESHES: list[tuple[str, str | None, dict[str, Any]]] = [
    ("dp=3", None, {}),
    ("dp_shard=2,tp=2", None, {"clip_grad_norm": 5e-3, "clip_grad_value": 1e-3}),
    ("tp=3", None, {"kind": torch.optim.Adamax}),
    ("dp_shard=5", None, {"kind": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)}),
    ("dp=2", None, {"microbatches": 2, "clip_grad_norm": 5e-3}),
    ("dp=2", None, {"microbatches": 3, "batch_mix": "mean_of_parts"}),
    ("pp=2,dp=2", None, {"microbatches": 2, "clip_grad_norm": 5e-3}),
    ("dp=2,tp=2", "zero1", {"options": meshc.Options(training=meshc.Training(keep_gradients=True))}),
]


@pytest.mark.parametrize("mesh, plan, ask", MESHES)
def test_every_mesh_takes_the_step_of_one_device(mesh: str, plan: str | None, ask: dict[str, Any]) -> None:
    """Against torch's own scaler, whose scale changes at each step; and shown to be the traced graph."""
    program = step(mesh, plan, **ask)
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-12
    assert program.prove().holds


@pytest.mark.parametrize("mesh, plan, ask", MESHES)
def test_every_mesh_skips_what_one_device_skips(mesh: str, plan: str | None, ask: dict[str, Any]) -> None:
    """The first step is skipped, and the scale falls so far that the second is taken."""
    report = meshc.verify(step(mesh, plan, **{**ask, "scaler": scaler(init_scale=OVER, backoff_factor=2.0**-60)}, large=1e3))
    assert report.ok
    losses = [report.wanted[f"loss of step {number}", "output"] for number in range(3)]
    assert losses[0] == losses[1] != losses[2]


def _values(program: meshc.Program, scale: float, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    random = torch.manual_seed(5)
    values = {f"parameter:{name}": value.detach() for name, value in made().named_parameters()}
    for port in program.compiled.inputs:
        if port.key not in values:
            values[port.key] = torch.rand(port.shape, generator=random, dtype=torch.float64).to(port.dtype)
    return values | {"number:loss_scale": torch.tensor(scale, dtype=torch.float64)} | more


KEPT = [
    meshc.Training(), meshc.Training(optimizer_state="bf16"), meshc.Training(optimizer_state="8bit"), meshc.Training(master_weights=True),
]  # fmt: skip


@pytest.mark.parametrize("mesh", ["dp=2", "dp_shard=2,tp=2"])
@pytest.mark.parametrize("training", KEPT, ids=["", "bf16", "8bit", "masters"])
def test_a_skipped_step_changes_nothing(mesh: str, training: meshc.Training) -> None:
    """Parameters and state bit for bit, step counts too, in whatever form they are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 300), nn.GELU(), nn.Linear(300, 7))
    if training.master_weights:
        model.bfloat16()
    x, target = (torch.randn(12, size, generator=torch.manual_seed(size)).to(model[0].weight.dtype) for size in (12, 7))
    train = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss, scaler=scaler())
    options = meshc.Options(training=training)
    program = meshc.compile(train, meshc.Mesh(mesh), args=(x,), kwargs={"target": target}, options=options)
    values = {f"parameter:{name}": value.detach() for name, value in model.named_parameters()}
    values |= {"input:input": x, "input:target": target, "number:loss_scale": torch.tensor(8.0, dtype=torch.float64)}
    values |= {port.key: torch.zeros(port.shape, dtype=port.dtype) for port in program.compiled.inputs if port.key not in values}
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    values |= {f"number:0.{name}": torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    if training.master_weights:
        values |= {f"state:{name}/meshc.master": value.detach().float() for name, value in model.named_parameters()}
    taken = simulate(program.compiled, values)
    assert taken["metric:skipped"] == 0
    kept = [key for key in taken if key.startswith(("parameter:", "state:")) and not key.endswith("meshc.non_finite")]
    assert all(not torch.equal(taken[key], values[key]) for key in kept)
    skipped = simulate(program.compiled, {**values, **{key: taken[key] for key in kept}, "input:target": target * torch.inf})
    assert skipped["metric:skipped"] == 4
    assert [key for key in kept if not torch.equal(skipped[key], taken[key])] == []


def test_what_is_not_finite_is_known_of_each_parameter_by_one_message() -> None:
    program = step("dp_shard=2")
    values = _values(program, 4.0)
    values["input:input"] = values["input:input"].index_fill(0, torch.tensor(11), torch.inf)  # the last rank's
    found = simulate(program.compiled, values)
    assert all(found[f"state:{name}/meshc.non_finite"] == 1 for name in ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight"))
    (stage,) = program.compiled.stages.values()
    sent = [node for node in stage.graph.nodes if node.target is spmd.all_reduce and node.args[2] == "max"]
    assert len(sent) == 1


def test_layers_captured_once_are_scaled_alike() -> None:
    model, ids = Stack([16] * 6), torch.zeros(4, 3, dtype=torch.int64)
    train = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy, scaler=scaler())
    program = meshc.compile(train, meshc.Mesh("dp_shard=2"), kwargs={"ids": ids, "target": ids})
    assert program.lowered.depth is not None
    assert meshc.verify(program).ok and program.prove().holds
    known = [port.of for port in program.compiled.outputs if port.name.endswith("meshc.non_finite")]
    assert sorted(known) == sorted(name for name, _ in model.named_parameters())


def _is_copy(node: Node) -> None:
    node.target, node.args = aten.clone.default, (node.args[0],)


FAULTS: dict[str, tuple[object, Callable[[Node], bool], Callable[[Node], None]]] = {
    "each rank decides by its own part": (spmd.all_reduce, lambda node: node.args[2] == "max", _is_copy),
    "each stage decides by its own parameters": (spmd.all_reduce, lambda node: [*node.args[1]] == ["pp"], _is_copy),
    "a count of steps that goes on": (
        ours.update_if_.default, lambda node: record(node.args[1]).shape == (), lambda node: put(node, 2, node.args[2].all_input_nodes[0]),
    ),
    "a skip that is turned round": (aten.eq.Scalar, lambda node: True, lambda node: setattr(node, "target", aten.ne.Scalar)),
    "gradients that stay scaled": (aten.reciprocal.default, lambda node: record(node).dtype == torch.float64, _is_copy),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_refused(name: str) -> None:
    target, where, plant = FAULTS[name]
    program = step("pp=2,dp_shard=2", microbatches=2)
    stages = {key: replace(stage, graph=copy_graph(stage.graph)) for key, stage in program.compiled.stages.items()}
    found = [node for stage in stages.values() for node in stage.graph.nodes if node.target is target and where(node)]
    assert found
    for node in found:
        plant(node)
    assert erase(program.compiled, program.lowered.joint.as_stage()).holds
    assert not erase(replace(program.compiled, stages=stages), program.lowered.joint.as_stage()).holds


def test_a_disabled_scaler_is_none() -> None:
    texts = [hash_program(step("dp=2", scaler=one).compiled) for one in (None, scaler(enabled=False), scaler())]
    assert texts[0] == texts[1] != texts[2]


def test_scales_are_those_of_torch() -> None:
    """Over a long run with skipped steps, growth to the end of float32, and settings that are no powers of two."""
    ours, theirs = (scaler(init_scale=3.0, growth_interval=3, growth_factor=7.3, backoff_factor=0.3) for _ in range(2))
    random = torch.manual_seed(3)
    for number in range(400):
        skipped = bool(torch.rand((), generator=random) < (0.5 if number < 60 else 0.01))
        theirs.scale(torch.zeros(()))
        state = theirs._per_optimizer_states[0]
        state["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(skipped))}
        theirs.update()
        loss_scaling.advance(ours, skipped, torch.device("cpu"))
        assert ours.state_dict() == theirs.state_dict()
    assert ours.get_scale() > 1e30


def test_what_is_refused(tmp_path: Any) -> None:
    with pytest.raises(meshc.PlanError, match=r'scaler=float: a torch.amp.GradScaler\("cuda"\), or None'):
        step("dp=2", scaler=1.0)
    with pytest.raises(meshc.PlanError, match="(?s)0.weight, 0.bias.*in float16 have gradients in it.*keep parameters in float32"):
        step("dp=2", model=made(torch.float16))
    with pytest.raises(meshc.PlanError, match="(?s)compress dp: int8.*the loss's scale.*TrainStep without scaler="):
        step("dp=2", "dp: batch\ncompress dp: int8")
    with pytest.raises(meshc.StateError, match="a saved program has no scaler"):
        step("dp=2").save(tmp_path / "saved")
    with pytest.raises(meshc.CaptureError, match="a metric 'skipped'"):
        model = made()
        train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=lambda y: (y.mean(), {"skipped": y.sum()}))
        meshc.compile(train, meshc.Mesh("dp=2"), args=(torch.randn(4, 12),))


@pytest.mark.parametrize("plan", ["dp_shard: batch; store params", "dp_shard: batch; store state", "dp_shard: batch\noffload state"])
def test_updates_of_gathered_parameters_and_of_state_on_the_host(plan: str) -> None:
    for training in KEPT[:2]:
        program = step("dp_shard=2", plan, options=meshc.Options(training=training))
        assert meshc.verify(program).ok and program.prove().holds
        assert meshc.verify(step("dp_shard=2", plan, large=1e3, scaler=scaler(init_scale=OVER, backoff_factor=2.0**-60))).ok
