"""batch_mix="mean_of_parts" against plain accumulation written out by hand: on simulated ranks, saved and loaded, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc import artifact
from meshc.ir.schemas import call_number, place_of
from meshc.ops import random
from meshc.program.program import PlainProgram
from meshc.runtime.simulator.simulation import simulate
from tests.broad import broad
from tests.models import mlp, resnet

SEED = 5


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.up(x), 0.5))


def compiled(
    model: nn.Module, loss: Callable[..., Tensor], kwargs: dict[str, Any], mesh: str, plan: str, microbatches: int, **more: Any
) -> meshc.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=loss, microbatches=microbatches, batch_mix="mean_of_parts")
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=kwargs, plan=plan, **more)


def step_of(program: PlainProgram, model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one call gives, by key, from the values of `model`."""
    tensors = {f"parameter:{name}": value.detach() for name, value in model.named_parameters()}
    tensors |= {f"buffer:{name}": value for name, value in model.named_buffers()}
    tensors |= {f"input:{name}": value for name, value in inputs.items()}
    tensors |= {port.key: random.seed_step(SEED) for port in program.inputs if port.kind == "random"}
    lr = {"number:0.lr": 0.5}  # SGD's other numbers are zero
    tensors |= {port.key: torch.tensor(lr.get(port.key, 0.0), dtype=torch.float64) for port in program.inputs if port.kind == "number"}
    return simulate(program, {port.key: tensors[port.key] for port in program.inputs if port.kind != "constant"})


def by_hand(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], count: int) -> tuple[float, nn.Module]:
    """(loss, the model after a step): gradients of loss / count accumulated part by part."""
    twin = copy.deepcopy(model)
    total = 0.0
    for index in range(count):
        loss = loss_of(twin, index) / count
        loss.backward()
        total += loss.item()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    return total, twin


def agree(found: dict[str, Tensor], loss: float, after: nn.Module) -> None:
    (output,) = (value for key, value in found.items() if key.startswith("output:"))
    assert abs(output.item() - loss) < 1e-12
    for kind, values in (("parameter", after.named_parameters()), ("buffer", after.named_buffers())):
        for name, value in values:
            assert torch.allclose(found[f"{kind}:{name}"].double(), value.double(), rtol=1e-9, atol=1e-11), name


@pytest.mark.parametrize(
    "plan, axis, ranks", [broad("ddp", "dp", 3), ("fsdp", "dp_shard", 2), broad("ddp", "dp", 2), broad("fsdp", "dp_shard", 3)]
)
def test_batch_norm_sees_one_microbatch_and_all_its_ranks(plan: str, axis: str, ranks: int, tmp_path: Path) -> None:
    case = resnet(torch.float64, batch=8)
    program = compiled(case.model, case.loss, case.call_kwargs, f"{axis}={ranks}", plan, 2)  # type: ignore[arg-type]
    images, target = case.kwargs["images"], case.target_kwargs["target"]

    def part(model: nn.Module, index: int) -> Tensor:
        rows = slice(4 * index, 4 * index + 4)
        return F.cross_entropy(model(images[rows]), target[rows])

    loss, after = by_hand(case.model, part, 2)
    assert int(after.get_buffer("bn.num_batches_tracked")) == 2
    agree(step_of(program.compiled, case.model, case.call_kwargs), loss, after)
    whole = F.cross_entropy(copy.deepcopy(case.model)(images), target).item()
    assert abs(whole - loss) > 1e-3  # the mean of the parts is something else
    if ranks == 2:
        program.save(tmp_path / "p.meshc")
        loaded = artifact.load(tmp_path / "p.meshc")
        assert loaded.info["batch_mix"] == "mean_of_parts" and loaded.microbatches == 2
        assert loaded.port("input:images").shape == (8, 3, 16, 16)
        agree(step_of(loaded, case.model, case.call_kwargs), loss, after)


@pytest.mark.parametrize("count, mesh", [(2, "dp=2"), broad(2, "dp=3"), broad(6, "dp=2")])
def test_dropout_draws_the_rows_of_the_whole_batch(count: int, mesh: str) -> None:
    model = Dropped().double()
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    inputs = {"x": x, "target": target}
    program = compiled(model, F.mse_loss, inputs, mesh, "ddp", count)
    keep = random.keep_mask(random.seed_step(SEED), 0, 0.5, (6, 6))  # of the whole batch
    size = 6 // count

    def part(model: Any, index: int) -> Tensor:
        rows = slice(size * index, size * index + size)
        return F.mse_loss(model.down(model.up(x[rows]) * keep[rows] * 2), target[rows])

    agree(step_of(program.compiled, model, inputs), *by_hand(model, part, count))
    assert meshc.verify(program, inputs, dtype=torch.float64).worst < 1e-12


class AttentionDropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.5).squeeze(1)


def test_backward_draws_the_rows_that_forward_draws() -> None:
    inputs = {"x": torch.randn(6, 5, 4), "target": torch.randn(6, 5, 8)}
    program = compiled(AttentionDropped(), F.mse_loss, inputs, "dp=2", "ddp", 3)
    nodes = [node for stage in program.compiled.stages.values() for node in stage.graph.nodes if call_number(node) is not None]
    assert len(nodes) > 1  # the attention and its backward
    assert {node.args[place_of(node, "global_shape")][0] for node in nodes} == {6}  # type: ignore[index]


def test_denominators_and_weights_are_the_parts_own() -> None:
    """Ignored labels lie in the first microbatch only, so that its mean is over fewer rows; the weight carries no batch and is not cut."""
    case = mlp(torch.float64)
    target = case.target_kwargs["target"].clone()
    target[:2] = -100
    weight = torch.rand(10, dtype=torch.float64)
    inputs = {**case.kwargs, "target": target, "weight": weight}

    def loss(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight)

    program = compiled(case.model, loss, inputs, "dp=2", "ddp", 2)
    assert program.lowered.parts is not None and program.lowered.parts.dims == (0, 0, None)

    def part(model: nn.Module, index: int) -> Tensor:
        rows = slice(3 * index, 3 * index + 3)
        return loss(model(case.kwargs["x"][rows]), target[rows], weight)

    agree(step_of(program.compiled, case.model, inputs), *by_hand(case.model, part, 2))


def test_a_gradient_that_no_input_reaches_is_added_up_too() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.shift).mean() + self.shift.sum()

    model, x = Shifted(), torch.ones(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = meshc.TrainStep(model, optimizer=optimizer, microbatches=4, batch_mix="mean_of_parts")
    program = meshc.compile(step, meshc.Mesh("dp=1"), kwargs={"x": x})
    found = step_of(program.compiled, model, {"x": x})
    assert torch.allclose(found["parameter:shift"], torch.full((3,), -0.5 * (1 / 3 + 1), dtype=torch.float64))


@pytest.mark.broad
def test_verify_notices_a_microbatch_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = mlp()
    program = compiled(case.model, case.loss, case.call_kwargs, "dp=2", "ddp", 2)  # type: ignore[arg-type]
    assert meshc.verify(program).worst < 1e-5
    monkeypatch.setattr("meshc.runtime.simulator.reference_comparison.Reference.train", lambda self, step: _one_part(self))
    with pytest.raises(meshc.VerifyError, match="does not mean what the model means"):
        meshc.verify(program)


def _one_part(reference: Any) -> tuple[Tensor, dict[str, Tensor]]:
    args, kwargs = reference.parts.microbatch_inputs((reference.args, reference.kwargs), 0)
    loss: Tensor = reference.function(reference.module, *args, **kwargs)
    loss.backward()
    return loss.detach(), {}


# ------------------------------------------------------------------------------------------------------------------------ refusals


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))


def test_without_the_option_batch_norm_is_refused_and_the_option_named() -> None:
    model = Normed()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), loss=F.mse_loss, microbatches=2)
    with pytest.raises(meshc.CompileError) as raised:
        meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(6, 4), "target": torch.randn(6, 3)})
    text = str(raised.value)
    assert "mixes the whole batch" in text and "test_mean_of_parts.py" in text and 'TrainStep(..., batch_mix="mean_of_parts")' in text, text


def test_a_batch_that_does_not_divide() -> None:
    model, inputs = Dropped(), {"x": torch.randn(7, 4), "target": torch.randn(7, 3)}
    with pytest.raises(meshc.CompileError, match="the batch has 7 rows, which 2 microbatches do not divide"):
        compiled(model, F.mse_loss, inputs, "dp=2", "ddp", 2)
    part = {name: value[:3] for name, value in inputs.items()}
    with pytest.raises(meshc.CompileError, match="each rank's part of the batch has 3 rows, which 2 microbatches do not divide"):
        compiled(model, F.mse_loss, part, "dp=2", "ddp", 2, inputs="local")


def test_inputs_that_begin_with_other_sizes() -> None:
    model = Dropped()
    inputs = {"x": torch.randn(6, 4), "target": torch.randn(6, 3), "scale": torch.rand(5)}

    def loss(output: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        return F.mse_loss(output, target) * scale.mean()

    with pytest.raises(meshc.CompileError, match=r"x begins with 6, scale begins with 5\n.*names="):
        compiled(model, loss, inputs, "dp=2", "ddp", 2)
    program = compiled(model, loss, inputs, "dp=2", "ddp", 2, names={"scale": ("scales",)})
    assert program.lowered.parts is not None and program.lowered.parts.dims == (0, 0, None)  # x, target, scale


def test_an_axis_wider_than_a_microbatch() -> None:
    inputs = {"x": torch.randn(6, 4, dtype=torch.float64), "target": torch.randn(6, 3, dtype=torch.float64)}
    with pytest.warns(UserWarning, match=r"axis dp has 3 ranks, more than anything it could split \(batch 2 in a microbatch\): 1 of them"):
        program = compiled(Dropped().double(), F.mse_loss, inputs, "dp=3", "ddp", 3)
    assert meshc.verify(program, dtype=torch.float64).ok


def test_a_batch_inside_a_dim() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.up(x).reshape(-1, 6), 0.5).mean()  # [seq, batch, 6]: rows of all places of the sequence

    model = Rows()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters()), microbatches=2, batch_mix="mean_of_parts")
    with pytest.raises(meshc.CompileError, match=r"test_mean_of_parts.py:\d+ .*draws with the batch inside a dim"):
        meshc.compile(step, meshc.Mesh("dp=2"), kwargs={"x": torch.randn(5, 6, 4)}, names={"x": ("seq", "batch", None)})
