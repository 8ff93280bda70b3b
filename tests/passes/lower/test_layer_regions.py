"""By layer: what a backend compiles of a region with many layers does not grow with their number."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

import meshc
from meshc.ir import records
from meshc.ir.regions import blocks
from tests.broad import broad

ROWS, WIDTH = 4, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Stack(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(count)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), target)


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)), "target": torch.zeros(ROWS, dtype=torch.int64)}


def compiled(count: int, clip: float | None = None) -> meshc.Program:
    torch.manual_seed(0)
    model = Stack(count)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=clip)
    return meshc.compile(step, meshc.Mesh("dp=2"), kwargs=inputs(), backend="inductor")


def regions(program: meshc.Program) -> list[list[Node]]:
    """Of forward and backward: updates stand apart."""
    (stage,) = program.compiled.stages.values()
    found = [nodes for number, nodes in blocks(stage.graph.nodes) if number is not None]
    return [nodes for nodes in found if any(records(node)[0].phase != "update" for node in nodes)]


def face(nodes: list[Node]) -> Hashable:
    """What a region does, by whatever names."""
    number: dict[Node, int] = {}
    calls = [(node.target, repr(map_arg((node.args, node.kwargs), lambda n: number.setdefault(n, len(number))))) for node in nodes]
    return tuple((str(target), said) for target, said in calls)


@pytest.mark.parametrize("count", [7, broad(9), broad(12)])
def test_one_of_the_equal_layers_is_compiled(count: int) -> None:
    found = regions(compiled(count))
    if count < 8:
        assert len(found) == 1
        return
    assert len(found) == 2 * count  # the head is with the last layer, forward, and its backward with that
    assert len({face(nodes) for nodes in found}) <= 6  # first, inner and last, each way
    items = [{name for node in nodes for name in records(node)[0].source.module.split(".") if name.isdigit()} for nodes in found]
    assert all(str(layer) in items[layer] for layer in range(count))


def test_it_means_what_the_model_means() -> None:
    program = compiled(9)
    meshc.verify(program, inputs())


def test_what_clips_one_layer_is_compiled_for_all() -> None:
    """Each gradient is multiplied: so many operators of one region would be as many as there are parameters."""
    most, faces = [], []
    for count in (9, 12):
        (stage,) = compiled(count, clip=1.0).compiled.stages.values()
        found = [nodes for number, nodes in blocks(stage.graph.nodes) if number is not None]
        clipping = [nodes for nodes in found if all(records(node)[0].phase == "update" for node in nodes)]
        most.append(max(sum(node.target is torch.ops.aten.mul.Tensor for node in nodes) for nodes in clipping))
        faces.append(len({face(nodes) for nodes in clipping}))
    assert most == [6, 6]  # four linear weights and biases, two of the norm's, or the head's with them
    assert faces[0] == faces[1]
