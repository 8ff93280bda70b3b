"""A pass that breaks the structure of a graph is named, with the value and the user's line, whichever phase it is in."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

import meshc
from meshc import ir
from meshc.errors import CompilerFault
from meshc.ir import spmd
from meshc.passes import pass_runner, pipeline
from meshc.passes.phases.compiler_pass import Pass

X = torch.randn(4, 8)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def step() -> meshc.TrainStep:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return meshc.TrainStep(model, optimizer=optimizer, loss=lambda y: y.square().mean(), clip_grad_norm=1.0)


def relu_of(graph: Graph) -> Node:
    return next(node for node in graph.nodes if "relu" in str(node.target))


def behind_its_reader(graph: Graph) -> None:
    relu = relu_of(graph)
    next(iter(relu.users)).append(relu)


def without_record(graph: Graph) -> None:
    del relu_of(graph).meta[ir.KEY]


def of_another_shape(graph: Graph) -> None:
    ir.update(relu_of(graph), shape=(4, 8))


def of_one_rank(graph: Graph) -> None:
    """What all ranks of a pipeline add up, one of them does not."""
    total = next(node for node in graph.nodes if node.target is spmd.all_reduce and spmd.joins_stages(node))
    total.replace_all_uses_with(total.args[0])
    graph.erase_node(total)


Phase = Any
"""Of the pass that is planted."""


def torchs(break_it: Callable[[Graph], None]) -> Callable[[Phase], Phase]:
    return lambda phase: (break_it(phase.model.module.graph), phase)[1]


def joints(break_it: Callable[[Graph], None]) -> Callable[[Phase], Phase]:
    return lambda phase: (break_it(phase.joint.graph), phase)[1]


def stages(break_it: Callable[[Graph], None], name: str = "main") -> Callable[[Phase], Phase]:
    return lambda phase: (break_it(phase.stages[name].graph), phase)[1]


def one_key(left: Phase) -> Phase:
    stage = left.stages["main"]
    return replace(left, stages={"main": replace(stage, outputs=stage.outputs[:1] * len(stage.outputs))})


CASES = {
    "the model's graph": ("TRACE", 1, torchs(behind_its_reader), "dp=2", "output: MalformedGraph: it reads relu, which stands behind it"),
    "the joint graph's order": ("TRACE", 5, joints(behind_its_reader), "dp=2",
                                r"\w+: MalformedGraph: it reads relu, which stands behind it"),
    "its record": ("PLACE", 1, joints(without_record), "dp=2", "relu: MalformedGraph: it has no record"),
    "its ports": ("TRACE", 5, lambda left: replace(left, joint=replace(left.joint, inputs=left.joint.inputs[1:])), "dp=2",
                  r"output: MalformedGraph: \d values enter the graph, and there are \d ports for them"),
    "a rank's tile": ("LOWER", 1, stages(of_another_shape), "dp=2",
                      r"relu_default: MalformedGraph: its record says \[4, 8\], and the tile"),
    "a rank's keys": ("LOWER", 2, one_key, "dp=2", ".*: MalformedGraph: two of its ports are one"),
    "a collective of some ranks": ("LOWER", 2, stages(of_one_rank, "after_1"), "pp=2",
                                   ".*: MalformedGraph: between pipeline stages after_0 and after_1 meet in"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_broken_pass_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, place, broken, mesh, said = CASES[name]
    passes = getattr(pipeline, where)
    monkeypatch.setattr(pipeline, where, (*passes[:place], Pass("planted", broken), *passes[place:]))
    options = meshc.Options() if mesh == "dp=2" else meshc.Options(pipeline=meshc.Pipelining(splits=("down",)))
    with pytest.raises(CompilerFault) as raised:
        meshc.compile(step(), meshc.Mesh(mesh), args=(X,), options=options)
    first, *more = str(raised.value).splitlines()
    assert re.match(rf"compiling failed in the pass planted( at )?{said}", first), first
    if "relu" in first:
        assert re.fullmatch(r"  in your model: test_structure_check\.py:\d+.*", more[0])


def test_a_pass_that_leaves_a_graph_alone_costs_no_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it does change is looked at."""
    looks: list[str] = []
    verify = pass_runner.verify_graph
    monkeypatch.setattr(pass_runner, "verify_graph", lambda *args: looks.append("looked") or verify(*args))
    seen: list[int] = []

    def counting(left: Phase) -> Phase:
        seen.append(len(looks))
        return left

    def touching(left: Phase) -> Phase:
        (stage,) = left.stages.values()
        relu_of(stage.graph).meta["meshc"] = replace(ir.record(relu_of(stage.graph)), reason="touched")
        return counting(left)

    monkeypatch.setattr(pipeline, "LOWER", tuple(Pass(f"own{i}", run) for i, run in enumerate((counting, touching, counting))))
    meshc.compile(step(), meshc.Mesh("dp=2"), args=(X,))
    assert seen[1] == seen[0] and seen[2] == seen[1] + 1
