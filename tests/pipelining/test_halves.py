"""Backward in two halves: convolutions' backwards, which are one operator for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from meshc.passes.stages.halves import split_convolution_backwards
from meshc.program.program import PlainProgram, Stage
from tests.broad import broad
from tests.cost.building import Building
from tests.pipelining.cells import captured, verify

aten = torch.ops.aten
FLAT = ([1, 1], [1, 1], [1, 1], False, [0, 0])


def backward(shapes: list[tuple[int, ...]], settings: tuple[Any, ...], bias: bool, reads: tuple[int, ...]) -> Stage:
    """A stage that gives some results of a convolution's backward."""
    b = Building()
    grad, x, weight = (b.given(*shape) for shape in shapes)
    outputs = shapes[0][1]
    made = b.call(
        aten.convolution_backward.default, grad, x, weight, [outputs] if bias else None, *settings, [True, True, bias],
        made=[shapes[1], shapes[2], (outputs,)],
    )  # fmt: skip
    results = [b.graph.call_function(torch.ops.aten.relu.default, (b.item(made, index),)) for index in reads]
    b.graph.output(tuple(results))
    return Stage("each", b.graph, ("input:grad", "input:x", "parameter:w"), tuple(f"part:{index}" for index in reads))


def masks(stage: Stage) -> list[list[bool]]:
    return [node.args[-1] for node in stage.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)]


@pytest.mark.parametrize(
    "shapes, settings, bias",
    [
        ([(2, 6, 8, 8), (2, 4, 8, 8), (6, 4, 3, 3)], (*FLAT, 1), True),
        ([(2, 6, 8, 8), (2, 4, 8, 8), (6, 2, 3, 3)], (*FLAT, 2), False),
        ([(2, 6, 4, 4), (2, 4, 8, 8), (6, 4, 3, 3)], ([2, 2], *FLAT[1:], 1), True),
        ([(2, 6, 15), (2, 4, 8), (4, 6, 3)], ([2], [1], [1], True, [0], 1), True),
    ],
    ids=["plain", "groups", "stride", "transposed"],
)
def test_the_two_make_what_the_one_makes(shapes: list[tuple[int, ...]], settings: tuple[Any, ...], bias: bool) -> None:
    whole = backward(shapes, settings, bias, (0, 1, 2) if bias else (0, 1))
    halves = split_convolution_backwards(whole)
    assert masks(whole) == [[True, True, bias]] and masks(halves) == [[True, False, False], [False, True, bias]]
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in shapes]
    one, two = (GraphModule(torch.nn.Module(), stage.graph)(*given) for stage in (whole, halves))
    torch.testing.assert_close(two, one, rtol=0, atol=0)


@pytest.mark.parametrize("reads", [(0,), (1, 2), (2,)])
def test_what_makes_one_of_them_alone_is_left(reads: tuple[int, ...]) -> None:
    whole = backward([(2, 6, 8, 8), (2, 4, 8, 8), (6, 4, 3, 3)], (*FLAT, 1), True, reads)
    assert split_convolution_backwards(whole) is whole


def convolutions(program: PlainProgram, half: str) -> list[list[bool]]:
    return [mask for name, stage in program.stages.items() if name.startswith(half) for mask in masks(stage)]


@pytest.mark.parametrize("mesh, plan", [broad("pp=2", None), ("pp=2,cp=2", "cp: height")])
def test_gradients_of_convolutions_weights_wait(mesh: str, plan: str | None) -> None:
    """The first convolution reads the images, whose gradient nobody wants. Of a split height, neighbours' parts are read and added."""
    assert verify("unet", "zb_h1", mesh, plan=plan).ok
    program = captured("unet").latest
    inputs, weights = convolutions(program, "input"), convolutions(program, "weight")
    assert set(map(tuple, inputs)) == {(True, False, False)} and {mask[0] for mask in weights} == {False}
    assert len(weights) == len(inputs) + 1 == 13


def test_a_schedule_of_whole_backwards_has_them_whole() -> None:
    program = captured("unet").program("pp=2", microbatches=2, schedule="1f1b")
    assert sum(mask == [True, True, True] for mask in convolutions(program, "backward")) == 12
