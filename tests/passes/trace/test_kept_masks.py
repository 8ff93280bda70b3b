"""Masks that are made anew every so many steps: state that lies as its weight, the same on every mesh, read by products and decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshc
from meshc.errors import PlanError, VerifyError
from meshc.ir.keys import key_of
from meshc.optimizer.optimizer import numbers
from meshc.optimizer.spec import MASK, MASK_STEPS
from meshc.proof.program_proof import prove
from meshc.report.summary import collectives
from meshc.runtime.simulator.reference_masks import ReferenceMasks
from meshc.runtime.simulator.simulation import simulate
from tests.passes.trace.test_set_sparsity import Stack, inputs, largest, step

ours = torch.ops.meshc
LINE = "sparse layers.*: 2:4, every 2 until 2, decay 0.5"


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("dp=4", 1), ("dp=3,tp=2", 1), ("tp=2,sp=2", 1), ("dp_shard=2,tp=2", 1), ("cp=2,dp=2", 1), ("dp=2", 3), ("pp=2,dp_shard=2,tp=2", 3)],
)
def test_three_steps_are_the_same_on_every_mesh(mesh: str, microbatches: int) -> None:
    program = step(mesh, LINE, microbatches=microbatches)
    report = meshc.verify(program)
    masks = [error for kind, name, error in report.rows if kind.startswith(f"state {MASK} ")]
    assert report.worst < 1e-12 and len(masks) == 12 and max(masks) == 0
    assert str(program.prove()).startswith("proved")


def test_masks_lie_as_their_weights_and_cost_no_message() -> None:
    for mesh, plan in (("dp_shard=2", ""), ("dp=2", "dp: batch; store state\n"), ("dp_shard=2,tp=2", "")):
        kept, made = (step(mesh, f"{plan}sparse layers.*: 2:4{more}", layers=1) for more in (", every 2", ""))
        sent = [sorted((use.kind, use.bytes_per_rank) for use in collectives(one.compiled)) for one in (kept, made)]
        assert sent[0] == sent[1] and meshc.verify(kept).worst < 1e-12
        lying = {port.key: port.sharding for port in kept.compiled.inputs}
        name = "layers.0.up.weight"
        assert lying[key_of("state", f"{name}/{MASK}")] == lying[key_of("parameter", name)]


def test_layers_that_are_captured_once_have_masks_each() -> None:
    program = step("dp_shard=2", LINE, layers=6)
    assert program.lowered.depth is not None and meshc.verify(program).worst < 1e-12
    assert sum(port.name.endswith(MASK) for port in program.compiled.inputs) == 12


def test_masks_by_hand() -> None:
    """One weight, five steps: decided at steps 0 and 2, fixed from then on."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False).double()
    optimizer = torch.optim.SGD(layer.parameters(), lr=2.0)
    train = meshc.TrainStep(nn.Sequential(layer), optimizer=optimizer, loss=F.mse_loss)
    x, target = torch.randn(6, 8).double(), torch.randn(6, 4).double()
    plan = "sparse 0: 2:4, every 2 until 3, decay 0.25"
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": target}, plan=plan).compiled
    weight = layer.weight.detach().clone()
    values: dict[str, Any] = {"parameter:0.weight": weight, "input:input": x, "input:target": target}
    values |= {port.key: torch.zeros(port.shape, dtype=port.dtype) for port in program.inputs if port.kind == "state"}
    for group, row in enumerate(numbers(optimizer)):
        values |= {key_of("number", f"{group}.{name}"): torch.tensor(value, dtype=torch.float64) for name, value in row.items()}
    decided, mask = [], torch.zeros(())
    for number in range(5):
        if number in (0, 2):
            mask = largest(weight)
            decided.append(mask)
        read = (weight * mask).requires_grad_()
        F.mse_loss(x @ read.t(), target).backward()
        assert read.grad is not None
        moved = weight - 2.0 * (read.grad + 0.25 * torch.where(mask, 0.0, weight))
        values |= {key: value for key, value in simulate(program, values).items() if key in values}
        torch.testing.assert_close(values["parameter:0.weight"], moved)
        assert torch.equal(values[key_of("state", f"0.weight/{MASK}")], mask)
        assert values[key_of("state", f"0.weight/{MASK_STEPS}")].tolist() == [number + 1]
        weight = moved
    assert not torch.equal(*decided) and not torch.equal(largest(weight), mask)


def test_operators_by_hand() -> None:
    x, none = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.zeros(1, 4, dtype=torch.bool)
    old = torch.tensor([[True, True, False, False]])
    for steps, given, wanted in ((0, old, [0, 0, 1, 1]), (1, old, [1, 1, 0, 0]), (1, none, [0, 0, 1, 1]), (6, old, [1, 1, 0, 0])):
        mask = ours.next_mask(x, given, torch.tensor([steps]), 2, 1, 3, 5)
        assert mask.int().tolist() == [wanted], steps  # decided at 0 and 3, not at 6, and where there is none
        assert torch.equal(ours.keep_masked(x, given, torch.tensor([steps]), 2, 1, 3, 5), x * mask)


def test_lines_are_written_as_they_are_read() -> None:
    for line in (LINE, "sparse a.*: 1:8, every 10", "sparse a: 2:4, every 1 until 0"):
        (found,) = meshc.Plan(line).sparsities
        assert str(found) == line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sparse layers.*: 2:4, every", "a number belongs here: steps after which masks are made anew"),
        ("sparse layers.*: 2:4, every 0", "0 is too small a number of steps after which masks are made anew"),
        ("sparse layers.*: 2:4, every 10 until", "a number belongs here: the step from which masks stay as they are"),
        ("sparse layers.*: 2:4, every 10, fixed", "behind the comma stands `decay NUMBER`"),
        ("sparse layers.*: 2:4, until 10", "behind the comma stands `decay NUMBER`, `every COUNT`, or `fixed`"),
        ("sparse layers.*: 2:4, decay 0.1, every 10", "a sparse line ends after"),
    ],
)
def test_what_no_line_means_is_refused(line: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        meshc.Plan(line)


def test_what_has_no_steps_is_refused() -> None:
    with pytest.raises(PlanError, match=r"masks of `sparse layers.\*: 2:4, every 2 until 2, decay 0.5` are kept from one training step to"):
        meshc.compile(Stack(), meshc.Mesh("dp_shard=2"), args=inputs()[0], plan=LINE)
    with pytest.raises(PlanError, match="batch_mix=\"mean_of_parts\""):
        step("dp=2", LINE, microbatches=3, batch_mix="mean_of_parts")


@pytest.mark.parametrize("fault", ["another period", "a mask that is not kept", "a step that is not counted"])
def test_a_planted_fault_is_refuted(fault: str) -> None:
    program = step("dp_shard=2", LINE, layers=1)
    joint, plain = program.lowered.joint, program.compiled
    assert prove(plain, joint.as_stage(), joint.constants).holds
    (stage,) = plain.stages.values()
    if fault == "another period":
        node = stage.graph.find_nodes(op="call_function", target=ours.keep_masked.default)[-1]
        node.args = (*node.args[:5], 3, node.args[6])
    elif fault == "a mask that is not kept":
        node = stage.graph.find_nodes(op="call_function", target=ours.next_mask.default)[0]
        node.replace_all_uses_with(node.args[1])
    else:
        node = next(node for node in stage.graph.nodes if node.target is torch.ops.aten.add.Tensor and node.args[1] == 1)
        node.args = (node.args[0], 2)
    assert not prove(plain, joint.as_stage(), joint.constants).holds


def test_a_frozen_weight_has_the_mask_that_it_has() -> None:
    model = Stack()
    model.layers[0].up.weight.requires_grad_(False)
    program = step("dp_shard=2", LINE, model=model)
    assert meshc.verify(program).worst < 1e-12
    assert sum(port.name.endswith(MASK) for port in program.compiled.inputs) == 3


@pytest.mark.parametrize("fault", ["one step late", "a mask that is not kept"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "one step late":
        begin = ReferenceMasks.forget_steps

        def begin_late(masks: ReferenceMasks) -> None:
            begin(masks)
            masks.steps = 1

        monkeypatch.setattr(ReferenceMasks, "forget_steps", begin_late)
    else:
        monkeypatch.setattr(ReferenceMasks, "end_step", lambda masks: masks.left.clear())
    with pytest.raises(VerifyError):
        meshc.verify(step("dp=2", "sparse layers.*: 2:4, every 2", layers=1))
