"""Gradients rounded up or down by draws that are numbered by what they round, so that every mesh rounds alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.errors import VerifyError
from meshc.ir import formats
from meshc.ir.formats import ELEMENTS
from meshc.ops import quantize as _quantize  # noqa: F401 - registers its operators
from meshc.ops.random import seed_step, uniform
from meshc.ops.state_rounding import call_named
from meshc.proof.program_proof import prove
from meshc.runtime.simulator import reference_formats
from tests.passes.trace.test_set_precision import Stack, step

ours = torch.ops.meshc
ROW, FOUR = "float8 row, stochastic gradients", "nvfp4, stochastic gradients"


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [(FOUR, "dp=3,tp=2", 1), (ROW, "dp_shard=2,tp=2", 1), (FOUR, "cp=2,dp=2", 1), (ROW, "dp=2", 4), (ROW, "pp=2,dp=2", 1)],
)
def test_three_steps_are_the_same_on_every_mesh(name: str, mesh: str, microbatches: int) -> None:
    program = step(mesh, f"precision layers.*: {name}", microbatches=microbatches)
    assert meshc.verify(program).worst < 1e-12 and str(program.prove()).startswith("proved")


def test_layers_that_are_captured_once_have_draws_of_their_own() -> None:
    program = step("dp_shard=2", f"precision layers.*: {ROW}", layers=6)
    assert program.lowered.depth is not None and meshc.verify(program).worst < 1e-12
    nodes = [node for stage in program.compiled.stages.values() for node in stage.graph.nodes]
    names = {node.args[4] for node in nodes if node.target is ours.quantize_by_draw.default}
    assert len(names) == 2 * 3 * 6 - 2 and "layers.4.up.weight/meshc.weight_gradient" in names  # what goes into the first has no gradient


@pytest.mark.parametrize("batch_mix", ["refuse", "mean_of_parts"])
def test_modules_and_means_of_parts_draw_too(batch_mix: str) -> None:
    torch.manual_seed(0)
    line, args = f"precision layers.*: {ROW}", (torch.randn(16, 32, 128),)
    assert meshc.verify(meshc.compile(Stack(layers=1), meshc.Mesh("dp_shard=2,tp=2"), args=args, plan=line)).worst < 1e-12
    assert meshc.verify(step("dp=2", line, layers=1, microbatches=2, batch_mix=batch_mix)).worst < 1e-12


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1", "int8"])
def test_a_rounding_is_to_one_of_two_neighbours_and_right_in_the_mean(element: str) -> None:
    """Against all numbers of the element type, and the draws by themselves."""
    x = torch.linspace(-1.2, 1.2, 4001, dtype=torch.float64).reshape(1, -1) * ELEMENTS[element].largest
    x = torch.cat([x, x / 300, x / 30000]).reshape(1, -1)
    shape, scale = list(x.shape), torch.ones(1, 1)
    made = ours.quantize_by_draw(x, scale, element, seed_step(7, 3), "w/g", shape, shape, [0, 0]).double()
    numbers = _numbers(element)
    given = x.clamp(-ELEMENTS[element].largest, ELEMENTS[element].largest)
    place = (torch.searchsorted(numbers, given, right=True) - 1).clamp(0, len(numbers) - 2)
    low, high = numbers[place], numbers[place + 1]
    drawn = uniform(seed_step(7, 3), call_named("w/g"), shape).double()
    assert torch.equal(made, torch.where((given - low) / (high - low) > drawn, high, low))
    many = torch.full((1, 100_000), 0.3 * float(numbers[-1] - numbers[-2]) + float(numbers[-2]), dtype=torch.float64)
    shape = list(many.shape)
    mean = ours.quantize_by_draw(many, scale, element, seed_step(0), "w/g", shape, shape, [0, 0]).double().mean()
    assert abs(mean - many[0, 0]) < 0.01 * (numbers[-1] - numbers[-2])


def _numbers(element: str) -> Tensor:
    """All numbers of an element type, in order."""
    if element == "int8":
        return torch.arange(-127, 128).double()
    if element == "e2m1":
        positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        return torch.cat([-positive.flip(0), positive]).unique()
    found = torch.arange(256).to(torch.uint8).view(ELEMENTS[element].dtype).double()
    return found[found.isfinite()].unique()


class Turned(nn.Module):
    """Weights on either side of their products."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 32)), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.left @ (x @ self.right.t() @ self.right).t()[:16]).t().relu())


def test_weights_on_either_side() -> None:
    torch.manual_seed(0)
    model = Turned()
    train = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=F.mse_loss)
    inputs = torch.randn(12, 32), torch.randn(12, 8)
    program = meshc.compile(train, meshc.Mesh("dp=2"), args=inputs[:1], kwargs={"target": inputs[1]}, plan=f"precision *: {ROW}")
    assert set(program.lowered.placed.traced.precision) >= {"left", "right"} and meshc.verify(program).worst < 1e-12


@pytest.mark.parametrize("fault", ["another name", "to the nearest"])
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "another name":
        monkeypatch.setattr(reference_formats, "draw_name", lambda name, sums: formats.draw_name(name, not sums))
    else:
        nearest: Callable[..., Tensor] = lambda draws, blocks, scale, element: ours.quantize(blocks, scale, element)  # noqa: E731
        monkeypatch.setattr(reference_formats.GradientDraws, "quantize", nearest)
    with pytest.raises(VerifyError):
        meshc.verify(step("dp=2", f"precision layers.*: {ROW}", layers=1))


def test_draws_of_a_tile_are_refuted() -> None:
    program = step("dp=2", f"precision layers.*: {ROW}", layers=1)
    joint, plain = program.lowered.joint, program.compiled
    assert prove(plain, joint.as_stage(), joint.constants).holds
    (stage,) = plain.stages.values()
    node = stage.graph.find_nodes(op="call_function", target=ours.quantize_by_draw.default)[0]
    node.args = (*node.args[:7], [0] * len(node.args[7]))  # type: ignore[arg-type]
    assert not prove(plain, joint.as_stage(), joint.constants).holds
