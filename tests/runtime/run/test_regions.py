"""Regions: what is compiled together, when gathers of parameters start, and that Inductor's result may be written over."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx import Graph, Node

from meshc.ir import Record, set_record, spmd
from meshc.program.program import Stage
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.codegen import generate
from meshc.runtime.run.regions import _bundled, compile_regions, levels

aten = torch.ops.aten
BYTES = 4 * 4 * 4
"""Of a gathered weight."""


def add(graph: Graph, target: object, *args: object, rows: int = 4) -> Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    set_record(node, Record((rows, 4), torch.float32))
    return node


def layers(count: int) -> Stage:
    """x @ w0 @ w1 ..., each weight stored split over two ranks and gathered before its product."""
    graph = Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(f"w{index}") for index in range(count)]
    for node in (x, *weights):
        set_record(node, Record((2, 4), torch.float32))
    for weight in weights:
        x = add(graph, aten.mm.default, x, add(graph, spmd.all_gather, weight, ["dp"], 0), rows=2)
    graph.output([x])
    return Stage("main", graph, ("input:x", *(f"parameter:w{index}" for index in range(count))), ("output:y",))


def by_kind(stage: Stage, window: int) -> tuple[list[int], list[int]]:
    found = levels(stage, {}, window)
    calls = [node for node in stage.graph.nodes if node.op == "call_function"]
    return [found[n] for n in calls if n.target is spmd.all_gather], [found[n] for n in calls if n.target is aten.mm.default]


def test_one_window_gathers_all_before_one_region() -> None:
    assert by_kind(layers(4), 4 * BYTES) == ([0, 0, 0, 0], [1, 1, 1, 1])


def test_windows_start_before_the_region_that_reads_the_one_before() -> None:
    """Two weights a window: the third and the fourth travel while the first two are read."""
    gathers, products = by_kind(layers(6), 2 * BYTES)
    assert products == [1, 1, 2, 2, 3, 3]
    assert gathers == [0, 0, 0, 0, 1, 1]


def test_a_gather_is_never_after_its_reader() -> None:
    for count in range(1, 7):
        for window in range(1, 4):
            gathers, products = by_kind(layers(count), window * BYTES)
            assert all(gather < product for gather, product in zip(gathers, products, strict=True))


def test_what_starts_together_travels_together_and_keeps_its_level() -> None:
    """Two messages for six weights; what is cut from one is of the level of its first reader, what is joined of the message's own."""
    whole = layers(6)
    stage, level = _bundled(whole, {"dp": 2}, levels(whole, {}, 2 * BYTES))
    gathers = [node for node in stage.graph.nodes if node.target is spmd.all_gather]
    assert [(level[node], node.meta["meshc"].shape) for node in gathers] == [(0, (2 * 4 * 8,)), (1, (2 * 2 * 8,))]
    assert [level[node] for node in stage.graph.nodes if node.target is aten.mm.default] == [1, 1, 2, 2, 3, 3]
    assert [level[node] for node in stage.graph.nodes if node.target is aten.cat.default] == [0, 1]
    for node in stage.graph.nodes:
        for operand in node.all_input_nodes if node.op == "call_function" else []:
            assert level[node] >= level[operand] + (operand.target is spmd.all_gather)


def reductions(equal: bool) -> Stage:
    """Two gradients, each reduced and then doubled. Made alike, Inductor may make them one tensor."""
    graph = Graph()
    x = graph.placeholder("x")
    set_record(x, Record((4, 4), torch.float32))
    first = add(graph, aten.relu.default, x)
    second = add(graph, aten.relu.default if equal else aten.neg.default, x)
    reduced = [add(graph, spmd.all_reduce, node, ["dp"], "sum") for node in (first, second)]
    graph.output([add(graph, aten.mul.Tensor, node, 2.0) for node in reduced])
    return Stage("main", graph, ("input:x",), ("output:a", "output:b"))


@pytest.mark.parametrize("equal", [False, True])
def test_results_that_are_written_over_are_each_their_own(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of one an all-reduce does nothing, so a stand-in that adds one in place shows what it writes to."""
    from meshc.runtime.comm.collectives import Pending
    from meshc.runtime.run import codegen

    def starter(node: Node, groups: Groups, overwrites: bool):  # type: ignore[no-untyped-def]
        return lambda x: Pending(x.add_(1) if overwrites else x + 1)

    monkeypatch.setattr(codegen, "starter", starter)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    wanted = [2 * (x.relu() + 1), 2 * ((x.relu() if equal else -x) + 1)]
    groups, here = Groups({"dp": 1}, 0, 1), {"dp": 0}
    for make in (generate, compile_regions):
        run = make(reductions(equal), groups, here, torch.device("cpu"))
        for _ in range(2):
            for found, value in zip(run([x]), wanted, strict=True):
                torch.testing.assert_close(found, value)


def test_what_was_compiled_is_found_again() -> None:
    groups, x = Groups({"dp": 1}, 0, 1), torch.randn(4, 4)
    groups.prepare([("dp",)])
    for _ in range(2):
        counters.clear()
        compile_regions(reductions(False), groups, {"dp": 0}, torch.device("cpu"))([x])
    found = counters["aot_autograd"]["autograd_cache_hit"]
    assert found == 2 and not counters["inductor"]["fxgraph_cache_bypass"], counters
