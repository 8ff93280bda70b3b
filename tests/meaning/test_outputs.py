"""What comes back: structures, constants among them, tensors that are or share an input, a parameter, a buffer or another output."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import meshc
from tests.broad import broad
from tests.meaning.checks import MESHES, calls_alike, module_means_itself, step_means_itself

X = {"x": torch.randn(7, 6, generator=torch.Generator().manual_seed(1))}


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)


class Aliases(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(5.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        return {
            "input": x, "rows": x[:2], "h": h, "again": h, "turned": h.t(), "weight": self.linear.weight,
            "part": self.linear.weight.t()[1:], "buffer": self.steps, "ends": self.steps[1:3],
        }  # fmt: skip


@pytest.mark.parametrize("leaf", [broad(False, id="input"), pytest.param(True, id="differentiable input")])
def test_outputs_that_share_memory(leaf: bool) -> None:
    """Each takes its own gradient, also those that are views of an input or of another output."""
    torch.manual_seed(0)
    inputs = {"x": X["x"].clone().requires_grad_(leaf)}
    calls_alike(Aliases(), inputs)
    calls_alike(Aliases(), inputs, grad=False)
    for mesh in MESHES:
        program = module_means_itself(Aliases(), inputs, mesh)
        tangents = {port.name for port in program.compiled.inputs if port.kind == "tangent"}
        assert tangents == {"h", "again", "turned", "weight", "part"} | ({"input", "rows"} if leaf else set())
        module_means_itself(Aliases(), inputs, mesh, grad=False)


class Detached(Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            still = self.linear(x)
        h = self.linear(x)
        return h, still, h.detach(), h.argmax(-1), h > 0


def test_outputs_without_a_gradient_say_so() -> None:
    torch.manual_seed(0)
    found = calls_alike(Detached(), X)
    assert [leaf.requires_grad for leaf in found] == [True, False, False, False, False]
    module_means_itself(Detached(), X, "dp=4")


class Pair(NamedTuple):
    sum: Tensor
    count: int


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: list[Any]
    loss: Tensor | None = None


class Nested(Linear):
    def forward(self, x: Tensor, times: int, shift: bool = False, mode: str = "none") -> dict[str, Any]:
        h = self.linear(x) * times
        if shift:
            h = h + 1
        if mode == "relu":
            h = h.relu()
        return {"layers": [(h, None), 3, {"mode": mode, "best": h.argmax(-1)}], "pair": Pair(h.sum(), times), "nothing": ()}


@pytest.mark.parametrize("mode", [broad("none"), "relu"])
def test_structures_with_constants_among_the_tensors(mode: str) -> None:
    torch.manual_seed(0)
    inputs = {**X, "times": 3, "shift": mode == "relu", "mode": mode}
    found = calls_alike(Nested(), inputs)
    assert found["layers"][1] == 3 and found["layers"][0][1] is None and found["pair"].count == 3
    calls_alike(Nested(), inputs, grad=False)
    for mesh in MESHES:
        module_means_itself(Nested(), inputs, mesh)
        step_means_itself(Nested(), inputs, mesh)


class Dataclass(Linear):
    def forward(self, x: Tensor) -> dict[str, list[Result]]:
        h = self.linear(x)
        return {"results": [Result(h, [h.sum(), 2])]}


def test_a_dataclass_must_be_known_to_torch() -> None:
    with pytest.raises(meshc.CaptureError, match=r"returns a Result.*\n.*register_dataclass\(Result\)"):
        meshc.compile(Dataclass(), meshc.Mesh("dp=2"), kwargs=X)
    pytree.register_dataclass(Result)
    try:
        torch.manual_seed(0)
        module_means_itself(Dataclass(), X, "dp=4")
        found = calls_alike(Dataclass(), X)["results"][0]
        assert isinstance(found, Result) and found.extra[1] == 2 and found.loss is None
    finally:
        pytree._deregister_pytree_node(Result)


class Kinds(Linear):
    def forward(self, x: Tensor, keep: Tensor, ids: Tensor, low: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x).masked_fill(~keep[:, None], 0.0)
        wide = low.to(x.dtype) + half.to(x.dtype)
        return (
            h, keep, ~keep, ids, ids + 1, (ids * 2).to(torch.int32), ids.sum(), keep.any(), low, half * 2, h.bfloat16(), h.half(),
            h + wide[:, None], ids.float().mean(), (ids > 3).sum(0),
        )  # fmt: skip


@pytest.mark.parametrize("mesh", [MESHES[0], *map(broad, MESHES[1:])])
def test_integers_truths_and_16_bit_floats_come_and_go(mesh: str) -> None:
    torch.manual_seed(0)
    inputs = {
        **X, "keep": torch.arange(7) % 3 > 0, "ids": torch.randint(9, (7, 3)),
        "low": torch.randn(7).bfloat16(), "half": torch.randn(7).half(),
    }  # fmt: skip
    module_means_itself(Kinds(), inputs, mesh)
    module_means_itself(Kinds(), inputs, mesh, grad=False)
    if mesh == MESHES[0]:
        found = calls_alike(Kinds(), inputs)
        assert [leaf.dtype for leaf in found[8:12]] == [torch.bfloat16, torch.float16, torch.bfloat16, torch.float16]


class Empty(Linear):
    def forward(self, x: Tensor, none: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x)
        return torch.cat([h, none]) * scale, none, h[:0], self.linear(none.new_zeros(0, 6)), none.sum(), scale, h.sum() * scale


@pytest.mark.parametrize("mesh", [MESHES[0], *map(broad, MESHES[1:])])
def test_empty_tensors_and_scalars(mesh: str) -> None:
    torch.manual_seed(0)
    inputs = {**X, "none": torch.zeros(0, 8), "scale": torch.tensor(2.0)}
    module_means_itself(Empty(), inputs, mesh)
    module_means_itself(Empty(), inputs, mesh, grad=False)
    step_means_itself(Empty(), {**inputs, "scale": torch.tensor(0.5)}, mesh)
    if mesh == MESHES[0]:
        calls_alike(Empty(), inputs)


def test_a_function_with_plain_values_among_its_inputs() -> None:
    def scaled(x: Tensor, factor: float, negate: bool, how: str, shape: tuple[int, int]) -> dict[str, Any]:
        y = x.reshape(shape) * (-factor if negate else factor)
        return {"y": y.exp() if how == "exp" else y, "how": how, "factor": factor}

    inputs = {"x": X["x"].double(), "factor": 0.5, "negate": True, "how": "exp", "shape": (6, 7)}
    program = meshc.compile(scaled, meshc.Mesh("dp=4"), kwargs=inputs)
    assert meshc.verify(program, dtype=torch.float64).ok
    assert [port.name for port in program.compiled.inputs] == ["x"]
    assert program.lowered.placed.traced.model.output_tree.build([torch.ones(6, 7)])["factor"] == 0.5
