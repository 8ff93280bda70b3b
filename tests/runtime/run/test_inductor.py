"""Regions as they run: Inductor's result may be written over, what was compiled is found again, and a stranger's region is guarded."""

from __future__ import annotations

import re

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.fx import Graph, Node

from meshc.errors import MeshcError
from meshc.ir import Record, set_record, spmd
from meshc.passes.lower.group_regions import group_stage
from meshc.program.program import Stage
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.codegen import generate
from meshc.runtime.run.inductor import _compilation_units, compile_regions
from meshc.text.parse import parse_stage

aten = torch.ops.aten

def add(graph: Graph, target: object, *args: object, rows: int = 4) -> Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    set_record(node, Record((rows, 4), torch.float32))
    return node


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
    from meshc.runtime.comm.collectives import CollectiveWork
    from meshc.runtime.run import codegen

    def starter(node: Node, groups: Groups, overwrites: bool):  # type: ignore[no-untyped-def]
        return lambda x: CollectiveWork(x.add_(1) if overwrites else x + 1)

    monkeypatch.setattr(codegen, "starter", starter)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    wanted = [2 * (x.relu() + 1), 2 * ((x.relu() if equal else -x) + 1)]
    groups, here = Groups({"dp": 1}, 0, 1), {"dp": 0}
    for make in (generate, compile_regions):
        run = make(group_stage(reductions(equal), groups.sizes), groups, here, torch.device("cpu"))
        for _ in range(2):
            for found, value in zip(run([x]), wanted, strict=True):
                torch.testing.assert_close(found, value)


def test_what_was_compiled_is_found_again() -> None:
    groups, x = Groups({"dp": 1}, 0, 1), torch.randn(4, 4)
    groups.prepare([("dp",)])
    for _ in range(2):
        counters.clear()
        compile_regions(group_stage(reductions(False), groups.sizes), groups, {"dp": 0}, torch.device("cpu"))([x])
    found = counters["aot_autograd"]["autograd_cache_hit"]
    assert found == 2 and not counters["inductor"]["fxgraph_cache_bypass"], counters


def chain(layers: int, odd: int = -1) -> Stage:
    """Layers with a collective in the middle; one may add another number."""
    graph = Graph()
    value = graph.placeholder("x")
    set_record(value, Record((4, 4), torch.float32))
    for layer in range(layers):
        value = add(graph, spmd.all_reduce, add(graph, aten.relu.default, value), ["dp"], "sum")
        value = add(graph, aten.add.Tensor, value, 2.0 if layer == odd else 1.0)
    graph.output([value])
    return Stage("main", graph, ("input:x",), ("output:a",))


@pytest.mark.parametrize(("layers", "odd", "compiled"), [(7, -1, 3), (7, 3, 4)])
def test_equal_regions_are_compiled_once(layers: int, odd: int, compiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, those between two layers, the last; each was compiled by itself."""
    made, compile_one = [], torch._inductor.compile
    monkeypatch.setattr(torch._inductor, "compile", lambda module, given: (made.append(module), compile_one(module, given))[1])
    groups, x = Groups({"dp": 1}, 0, 1), torch.randn(4, 4)
    groups.prepare([("dp",)])
    run = compile_regions(group_stage(chain(layers, odd), groups.sizes), groups, {"dp": 0}, torch.device("cpu"))
    for _ in range(2):
        (found,) = run([x])
        torch.testing.assert_close(found, x.relu() + layers + (odd >= 0))
    assert len(made) == compiled


def test_regions_are_compiled_for_the_sizes_that_they_have() -> None:
    """Torch, left alone, would leave them open: loops over products of symbols, and no memory that is known to be as large as another's."""
    graph = Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    value = graph.call_function(aten.mm.default, (graph.call_function(aten.neg.default, (x,)), y))
    for node, shape in zip(graph.nodes, ((48, 64), (64, 2), (48, 64), (48, 2)), strict=True):
        set_record(node, Record(shape, torch.float32))
    graph.output([value])
    stage = group_stage(Stage("main", graph, ("input:x", "input:y"), ("output:a",)), {"dp": 1})
    run = compile_regions(stage, Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))
    with fresh_cache():
        (found,), (code,) = run_and_get_code(run, [torch.ones(48, 64), torch.ones(64, 2)])
    assert torch.equal(found, torch.full((48, 2), -64.0))
    assert re.findall(r"empty_strided_cpu\(\((\w+, \w+)\)", code) == ["48, 64", "48, 2"]


def test_in_a_region_of_a_text_what_needs_a_guard_runs_after_it_and_the_rest_is_compiled() -> None:
    """Rows that a gradient does not have: what was compiled in this process is trusted, what was read from a text is not."""
    text = """@ranks("dp=1")
def main(
    gradient: "f32[3, 4]" = "input:gradient",
    rows: "i64[3]" = "input:rows",
):
    with region(0):
        twice: "f32[3, 4]" = aten.mul.Tensor(gradient, 2.0)
        table: "f32[4, 4]" = aten.embedding_dense_backward(twice, rows, 4, -1, True)
        back: "f32[4, 4]" = aten.neg(table)
    return {
        "output:y": back,
    }
"""
    stage = parse_stage(text)
    assert [(compiled, [node.name for node in nodes]) for compiled, nodes in _compilation_units(stage, {})] == [
        (True, ["twice"]), (False, ["table"]), (True, ["back"]),
    ]  # fmt: skip
    gradient, rows = torch.arange(12.0).reshape(3, 4), torch.tensor([2, 0, 2])
    run = compile_regions(stage, Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))
    torch.testing.assert_close(run([gradient, rows])[0], -aten.embedding_dense_backward(2 * gradient, rows, 4, -1, True))
    with pytest.raises(MeshcError, match=r"line 8: table could not be made: .*its operands do not fit"):
        run([gradient, rows + 9])
