"""Scales made of the steps before: state that is the same on every mesh, known before what it rounds, reduced behind the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshc
from meshc.errors import PlanError, VerifyError
from meshc.ir import records, spmd
from meshc.ir.formats import ELEMENTS, Format, Role
from meshc.ir.keys import key_of
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.optimizer.spec import PEAKS
from meshc.passes.trace.step_state import refuse_without_steps
from meshc.proof.program_proof import prove
from meshc.rules import few_bits
from meshc.runtime.simulator.reference_scales import DelayedScales
from meshc.runtime.simulator.simulation import simulate
from tests.passes.trace.test_set_precision import step

ours = torch.ops.meshc
NAME = "float8 tensor, delayed"
LINE = f"precision layers.*: {NAME}"


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [("dp=4", 1), ("dp=3,tp=2", 1), ("dp_shard=2,tp=2", 1), ("cp=2,dp=2", 1), ("dp=2", 4), ("pp=2", 4), ("pp=2,dp_shard=2,tp=2", 2)],
)
def test_three_steps_are_the_same_on_every_mesh(mesh: str, microbatches: int) -> None:
    """Losses, gradients, histories and parameters, against the model on one device, which keeps histories of its own."""
    program = step(mesh, LINE, microbatches=microbatches)
    report = meshc.verify(program)
    kept = [name for kind, name, _ in report.rows if kind == "state meshc.activation_peaks after step 2"]
    assert report.worst < 1e-12 and len(kept) == 4  # `up` and `gate` read one activation
    assert str(program.prove()).startswith("proved")


def test_layers_that_are_captured_once_have_histories_each() -> None:
    program = step("dp_shard=2", LINE, layers=6)
    assert program.lowered.depth is not None and meshc.verify(program).worst < 1e-12
    assert sum(port.name.endswith(PEAKS["weight"]) for port in program.compiled.inputs) == 18


def test_no_reduction_stands_between_a_value_and_its_rounding() -> None:
    """All largest magnitudes are reduced behind the step, one message for each set of axes; with scales of now, each by itself."""
    for name, least, most in ((NAME, 1, 3), ("float8 tensor", 10, 99)):
        (stage,) = step("dp_shard=2,tp=2", f"precision layers.*: {name}").compiled.stages.values()
        peaks = [node for node in stage.graph.nodes if node.target is spmd.all_reduce and node.args[2] in ("min", "max")]
        assert least <= len(peaks) <= most, name
        if name == NAME:
            assert {records(user)[0].phase for node in peaks for user in node.users} == {"update"}


def test_a_scale_is_of_the_largest_of_sixteen_steps() -> None:
    """By hand: 18 steps of a model of one product, of which each has another largest activation."""
    model, x, y = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16)), torch.randn(4, 16), torch.randn(4, 16)
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loss=F.mse_loss)
    plain = meshc.compile(train, meshc.Mesh("dp=2"), args=(x,), kwargs={"target": y}, plan=f"precision 0: {NAME}").compiled
    values: dict[str, Any] = {port.key: torch.zeros(port.shape, dtype=port.dtype) for port in plain.inputs}
    values |= {key_of("parameter", name): parameter.detach() for name, parameter in model.named_parameters()}
    key, peaks = key_of("state", f"0.weight/{PEAKS['activation']}"), [float(number) for number in (40, *range(1, 18))]
    for number, peak in enumerate(peaks):
        (given,) = (port.key for port in plain.inputs if port.kind == "input" and "target" not in port.name)
        values[given] = torch.full((4, 16), -peak)
        values |= {name: value for name, value in simulate(plain, values).items() if name.startswith("state")}
        assert values[key].tolist() == ([*peaks[: number + 1][::-1], *[0.0] * 16])[:16]
    assert 40.0 not in values[key].tolist()


def test_operators_by_hand() -> None:
    history = torch.tensor([3.0, 7.0, 0.0])
    assert ours.scale_of_history(history, 2, "e4m3").tolist() == [[448.0 / 7]]
    assert ours.scale_of_history(torch.zeros(16), 1, "e5m2").tolist() == [1.0]
    x = torch.tensor([[1.0, -9.0], [float("nan"), 2.0]])
    assert ours.peak_of(x, [1]).tolist() == [[9.0], [float("inf")]]
    assert ours.next_history(history, ours.peak_of(x, [0, 1])).tolist() == [0.0, 3.0, 7.0]  # what is not finite is not counted
    assert ours.next_history(history, ours.peak_of(x[:1], [0, 1])).tolist() == [9.0, 3.0, 7.0]
    beyond = ours.quantize(torch.tensor([10.0]), ours.scale_of_history(torch.ones(2), 1, "e4m3"), "e4m3")
    assert float(beyond) == ELEMENTS["e4m3"].largest


def test_under_masks_beside_other_formats_and_compressed_gradients() -> None:
    program = step("dp=2,tp=2", f"{LINE}\nprecision layers.1.down: float8 row\nsparse layers.0: 2:4\ncompress dp: int8")
    assert meshc.verify(program).worst < 1e-12 and str(program.prove()).startswith("proved")


class Twice(nn.Module):
    """A layer that is called twice, one that is frozen, and one that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen, self.own = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.shared(F.relu(self.shared(x))))
        return self.head(F.relu(self.own(F.relu(self.frozen(x)))))


def trained(model: nn.Module, **ask: Any) -> meshc.Program:
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.mse_loss)
    inputs = torch.randn(4, 16), torch.randn(4, 16)
    return meshc.compile(train, meshc.Mesh("dp=2"), args=inputs[:1], kwargs={"target": inputs[1]}, plan=f"precision *: {NAME}", **ask)


def test_what_can_have_no_history_stays_as_it_is_or_is_refused() -> None:
    torch.manual_seed(0)
    program = trained(Twice())
    assert set(program.lowered.placed.traced.precision) == {"own.weight"} and meshc.verify(program).worst < 1e-12
    said = program.summary()
    assert "shared.weight is read by several products" in said and "frozen.weight has no gradient" in said
    traced = program.lowered.placed.traced
    with pytest.raises(PlanError, match="from one training step to the next"):
        refuse_without_steps(traced.with_request(replace(traced.request, adds=True)), "line 1", "scales are made", "`float8 tensor`")
    with pytest.raises(PlanError, match=r"a step that the scaler skips(.|\n)*TrainStep without scaler=.*or `float8 tensor`, whose scales"):
        step("dp=2", LINE, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(PlanError, match="`float8 tensor`, whose scales are of what is rounded"):
        meshc.compile(Twice(), meshc.Mesh("dp=2"), args=(torch.randn(4, 16),), plan=f"precision own: {NAME}")
    with pytest.raises(PlanError, match="mean_of_parts"):
        step("dp=2", LINE, microbatches=2, batch_mix="mean_of_parts")
    model = Twice()
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1), loss=F.mse_loss)
    with pytest.raises(PlanError, match="own.weight has products with delayed scales"):
        meshc.compile(
            train, meshc.Mesh("dp=2"), args=(torch.randn(4, 16),), kwargs={"target": torch.randn(4, 16)}, plan=f"precision own: {NAME}"
        )


@pytest.mark.parametrize("fault", ["a tile's magnitude", "a scale of now", "a step too long"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = step("dp=2", LINE, layers=1)
    if fault == "a step too long":
        end = DelayedScales.end_step

        def keep_first(scales: DelayedScales) -> None:
            before = dict(scales.histories)
            end(scales)
            scales.histories |= before

        monkeypatch.setattr(DelayedScales, "end_step", keep_first)
    elif fault == "a scale of now":
        monkeypatch.setattr(DelayedScales, "scale", lambda scales, x, role, form, name: _scale_of_now(x, form, role))
    else:
        rule = few_bits._extreme
        monkeypatch.setattr(few_bits, "_extreme", lambda *given: replace(rule(*given), sums=()))
    with pytest.raises(VerifyError):
        meshc.verify(program)


@pytest.mark.parametrize("fault", ["a tile's magnitude", "another operand's history", "a history that is not kept"])
def test_a_planted_fault_is_refuted(fault: str) -> None:
    program = step("dp=2", LINE, layers=1)
    joint, plain = program.lowered.joint, program.compiled
    assert prove(plain, joint.as_stage(), joint.constants).holds
    (stage,) = plain.stages.values()
    scales = stage.graph.find_nodes(op="call_function", target=ours.scale_of_history.default)
    if fault == "a tile's magnitude":
        node = next(node for node in stage.graph.nodes if node.target is spmd.all_reduce and node.args[2] == "max")
        node.replace_all_uses_with(node.args[0])
    elif fault == "another operand's history":
        scales[0].args = (scales[1].args[0], *scales[0].args[1:])
    else:
        made = stage.graph.find_nodes(op="call_function", target=ours.next_history.default)[0]
        made.replace_all_uses_with(made.args[0])
    assert not prove(plain, joint.as_stage(), joint.constants).holds


def _scale_of_now(x: torch.Tensor, form: Format, role: Role) -> torch.Tensor:
    scale: torch.Tensor = ours.scale_of(x, list(range(x.dim())), form.gradient if role == "gradient" else form.element, "")
    return scale


def test_the_summary_counts_histories_as_state() -> None:
    program = step("dp=2", LINE)
    states = Counter(port.name.rpartition("/")[2] for port in program.compiled.inputs if port.kind == "state")
    assert states == {PEAKS["weight"]: 6, PEAKS["activation"]: 4, PEAKS["gradient"]: 6}
    assert all(port.shape == (16,) and not port.sharding.split_axes() for port in program.compiled.inputs if port.kind == "state")  # type: ignore[union-attr]
