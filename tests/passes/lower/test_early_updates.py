"""Updates stand where their gradients are there and nothing reads any more what they write; gradients' memory serves one after another."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.fx import Graph, Node

import meshc
from meshc.cost import peak_memory
from meshc.ir import KEY, calls, local_bytes, record, records, set_record, spmd
from meshc.ir.regions import blocks
from meshc.passes.lower.early_updates import move_updates_early
from meshc.passes.lower.fuse_updates import fuse_stage_updates
from meshc.program import bucket
from meshc.program.static_memory import places, sizes_of
from meshc.text.parse import parse_stage
from tests.broad import broad
from tests.passes.stepped import steps

WIDTH, LAYERS = 384, 8
WEIGHT = 4 * WIDTH * WIDTH
BUCKET = 2
"""Layers, whose gradients have a mebibyte and a little."""


@pytest.fixture(autouse=True)
def _four_buckets(monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> None:
    """As of a larger model; of one of four mebibytes there would be two."""
    monkeypatch.setattr(bucket, "ALONE", BUCKET * WEIGHT)


class Deep(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if tied:
            self.layers[LAYERS - 1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def step_of(clip: float | None = None, tied: bool = False, microbatches: int = 1) -> meshc.TrainStep:
    torch.manual_seed(0)
    model = Deep(tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return meshc.TrainStep(model, optimizer=optimizer, loss=nn.functional.mse_loss, clip_grad_norm=clip, microbatches=microbatches)


def compiled(mesh: str = "dp=2", plan: str | None = None, backend: str = "eager", **ask: object) -> meshc.Program:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs = {"args": (x,), "kwargs": {"target": torch.zeros(4, WIDTH)}}
    return meshc.compile(step_of(**ask), meshc.Mesh(mesh), plan=plan, backend=backend, **inputs)  # type: ignore[arg-type]


def graph_of(program: meshc.Program) -> Graph:
    (stage,) = program.compiled.stages.values()
    return stage.graph


def updates(graph: Graph) -> list[Node]:
    return [node for node in calls(graph) if "sgd" in str(node.target)]


def parameters(update: Node) -> list[str]:
    return [node.name for node in update.args[0]]  # type: ignore[union-attr]


def test_each_bucket_is_updated_when_the_next_one_has_started() -> None:
    graph = graph_of(compiled())
    order = {node: at for at, node in enumerate(graph.nodes)}
    found, reductions = updates(graph), [node for node in calls(graph) if node.target is spmd.all_reduce]
    assert [{int(name.split("_")[1]) for name in parameters(update)} for update in found] == [
        set(range(5, 8)), {3, 4}, {1, 2}, {0}  # the first bucket has the loss too, and is no mebibyte of gradients
    ]  # fmt: skip
    starts = [order[node] for node in reductions if local_bytes(record(node)) >= WEIGHT]
    assert len(starts) == 5  # four buckets, and what is left
    for (update, after), start in zip(pairwise(found), starts[2:], strict=True):
        assert start < order[update] < order[after]


def test_what_is_updated_is_read_no_more() -> None:
    for ask in ({}, {"tied": True}):
        graph = graph_of(compiled(**ask))  # type: ignore[arg-type]
        order = {node: at for at, node in enumerate(graph.nodes)}
        assert len(updates(graph)) > 1
        for update in updates(graph):
            for written in update.args[0]:  # type: ignore[union-attr]
                readers = [user for user in written.users if user.op == "call_function" and user is not update]
                assert readers and max(map(order.__getitem__, readers)) < order[update]
    assert "layers_0_weight" in parameters(updates(graph)[-1])  # read by the first layer and by the last


def test_not_all_gradients_are_there_at_once() -> None:
    early, clipped = (peak_memory.peak_rank(compiled(clip=clip).compiled).peak.gradients for clip in (None, 1e9))
    assert clipped == LAYERS * WEIGHT and early < 3.01 * BUCKET * WEIGHT


def test_where_gradients_are_clipped_all_are_updated_behind_the_norm() -> None:
    graph = graph_of(compiled(clip=1.0))
    (update,) = updates(graph)
    assert len(parameters(update)) == LAYERS


def test_buckets_lie_in_the_same_memory_one_after_another() -> None:
    graph = graph_of(compiled())
    found = places(graph)
    assert sorted(map(len, found)) == [1, 1, 2]
    assert sum(sizes_of(found)) < 3.01 * BUCKET * WEIGHT


def test_a_region_ends_where_a_bucket_does() -> None:
    """A bucket travels while the next one's region runs, and its gradients are gone before the one after that."""
    program = compiled(backend="inductor")
    graph = graph_of(program)
    order = {node: at for at, node in enumerate(graph.nodes)}
    regions = [members[-1] for number, members in blocks(graph.nodes) if number is not None]
    starts = [node for node in calls(graph) if node.target is spmd.all_reduce and local_bytes(record(node)) >= WEIGHT]
    assert len(starts) == 5 and len(updates(graph)) == 4
    for (update, after), start, ahead in zip(pairwise(updates(graph)), starts[1:-1], starts[2:], strict=True):
        assert any(order[start] < order[last] < order[ahead] for last in regions)
        assert order[ahead] < order[update] and any(order[update] < order[last] < order[after] for last in regions)
    assert peak_memory.peak_rank(program.compiled).peak.gradients < 3.01 * BUCKET * WEIGHT


@pytest.mark.broad
def test_a_limit_says_how_much_is_updated_together() -> None:
    before = steps(step_of(), "dp=2", x=torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))["collectives"]
    before = before[: before.index("schedule = [")]
    for limit, counts in ((1, [1] * LAYERS), (LAYERS // 2 * WEIGHT, [LAYERS // 2] * 2), (100 * WEIGHT, [LAYERS])):
        assert [len(parameters(update)) for update in updates(fuse_stage_updates(parse_stage(before), limit).graph)] == counts


@pytest.mark.parametrize("mesh, plan, ask", [
    pytest.param("dp=2", None, {"tied": True}, id="tied"), pytest.param("dp_shard=2", None, {}, id="fsdp"),
    broad("dp=2", None, {}, id="dp"), broad("dp=3", "zero2", {}, id="zero2 uneven"),
    broad("dp=2", None, {"microbatches": 2}, id="microbatches"),
])  # fmt: skip
def test_a_step_means_what_it_means(mesh: str, plan: str | None, ask: dict[str, object]) -> None:
    report = meshc.verify(compiled(mesh, plan, **ask), dtype=torch.float64)
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in report.rows}


def test_what_two_updates_read_is_brought_once() -> None:
    """A gradient that is cut for one update, and read by another optimizer's too, stands before the first."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": nn.Linear(8, 8, bias=False), "two": nn.Linear(8, 8, bias=False)})

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner["one"](x) + self.inner["two"](x)

    optimizers = [torch.optim.AdamW(model["one"].parameters()), torch.optim.SGD(model["two"].parameters(), lr=0.1, momentum=0.9)]
    step = meshc.TrainStep(Same().double(), optimizer=optimizers, loss=nn.functional.mse_loss)
    ask = {"args": (torch.randn(4, 8).double(),), "kwargs": {"target": torch.randn(4, 8).double()}}
    program = meshc.compile(step, meshc.Mesh("tp=2"), plan="tp: features; store params, grads, state", **ask)  # type: ignore[arg-type]
    report = meshc.verify(program, dtype=torch.float64)
    assert {"parameter after step 2"} <= {kind for kind, *_ in report.rows}


def test_a_norm_may_have_more_terms_than_python_has_frames() -> None:
    before = steps(step_of(clip=1.0), "dp=2", x=torch.zeros(4, WIDTH), target=torch.zeros(4, WIDTH))["collectives"]
    graph = parse_stage(before[: before.index("schedule = [")]).graph
    (norm,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sqrt.default)
    (total,) = norm.all_input_nodes
    assert total.target is torch.ops.aten.add.Tensor
    last = total
    for _ in range(2 * sys.getrecursionlimit()):
        with graph.inserting_after(last):
            last = graph.node_copy(total)
        last.args = (last.prev, total.args[1])
    norm.replace_input_with(total, last)
    for node in (node for node in calls(graph) if node > total.all_input_nodes[-1] and node.target is not spmd.all_reduce):
        in_update = tuple(replace(one, phase="update") for one in records(node))  # the text of a stage does not say it
        set_record(node, in_update if isinstance(node.meta[KEY], tuple) else in_update[0])
    move_updates_early(graph)
    found = [node for node in calls(graph) if node.target is torch.ops.meshc.sgd.default]
    assert len(found) == LAYERS and min(found) > norm
