"""What passes look up in a graph, on one of six nodes."""

import operator

import torch
from torch.fx import Graph, Node

from meshc import ir
from meshc.ir import graph as toolbox
from meshc.ir import keys

aten = torch.ops.aten


def small() -> tuple[Graph, dict[str, Node]]:
    """x, w -> t = t(w), a = mm(x, t), b = relu(a), c = relu(a) -> b + c"""
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    t = graph.call_function(aten.t.default, (w,), name="t")
    a = graph.call_function(aten.mm.default, (x, t), name="a")
    b = graph.call_function(aten.relu.default, (a,), name="b")
    c = graph.call_function(aten.relu.default, (a,), name="c")
    total = graph.call_function(aten.add.Tensor, (b, c), name="total")
    graph.output((total,))
    return graph, {node.name: node for node in graph.nodes}


def names(nodes: object) -> list[str]:
    return sorted(node.name for node in nodes)  # type: ignore[attr-defined]


def test_ends() -> None:
    graph, at = small()
    assert toolbox.placeholders(graph) == [at["x"], at["w"]]
    assert toolbox.results_of(graph) == (at["total"],)
    toolbox.set_results(graph, [at["b"], at["a"]])
    assert toolbox.results_of(graph) == (at["b"], at["a"])


def test_what_a_value_is_made_of_and_what_reads_it() -> None:
    _, at = small()
    assert names(toolbox.ancestors_of([at["b"]])) == ["a", "b", "t", "w", "x"]
    assert names(toolbox.ancestors_of([at["b"]], through=lambda node: node is not at["a"])) == ["a", "b"]
    assert names(toolbox.descendants_of([at["w"]])) == ["a", "b", "c", "t", "total", "w"]
    assert names(toolbox.descendants_of([at["w"]], through=lambda node: node is not at["a"])) == ["a", "t", "w"]


def test_what_is_made_of_some_values_alone() -> None:
    graph, at = small()
    assert names(toolbox.computable_from(graph, [at["w"]])) == ["t", "w"], "a reads x too"
    assert names(toolbox.computable_from(graph, [at["w"], at["x"]])) == ["a", "b", "c", "t", "total", "w", "x"]
    assert names(toolbox.computable_from(graph, [at["w"], at["x"]], through=lambda node: node is not at["t"])) == ["t", "w", "x"]


def test_last_reads() -> None:
    graph, at = small()
    last = toolbox.last_reads(graph.nodes)
    assert (last[at["a"]], last[at["x"]]) == (at["c"], at["a"])
    assert toolbox.values_freed_after(last)[at["total"]] == [at["b"], at["c"]]


def test_equal_calls_are_merged_from_operand_to_reader() -> None:
    """`y1 + 1` and `y2 + 1` are equal once y1 and y2 are; 1, 1.0 and True are three numbers, and a draw is equal to none."""
    graph = Graph()
    x = graph.placeholder("x")
    y1, y2 = (graph.call_function(aten.relu.default, (x,)) for _ in range(2))
    sums = [graph.call_function(aten.add.Tensor, (y, one)) for y in (y1, y2) for one in (1, 1.0, True)]
    draws = [graph.call_function(aten.rand_like.default, (x,)) for _ in range(2)]
    graph.output((*sums, *draws))
    for node, first in toolbox.equal_calls(graph.nodes):
        node.replace_all_uses_with(first)
    found = toolbox.results_of(graph)
    assert found == (*sums[:3], *sums[:3], *draws)


def test_a_copy_keeps_records_and_a_call_has_one() -> None:
    graph, at = small()
    ir.set_record(at["a"], ir.Record((2, 3), torch.float32))
    copy = toolbox.copy_graph(graph)
    (mine,) = [node for node in copy.nodes if node.name == "a"]
    assert mine is not at["a"] and ir.record(mine) == ir.Record((2, 3), torch.float32)
    ir.update(mine, shape=(4,))
    assert ir.record(at["a"]).shape == (2, 3)
    with copy.inserting_after(mine):
        made = toolbox.call(copy, ir.record(mine), aten.sum.dim_IntList, mine, [0], keepdim=True)
    assert (made.args, made.kwargs, ir.record(made).shape) == ((mine, [0]), {"keepdim": True}, (4,))
    again = toolbox.add_placeholder(Graph(), at["a"])
    assert (again.op, again.name, ir.record(again).shape) == ("placeholder", "a", (2, 3))
    assert operator.is_not(again.meta, at["a"].meta)


def test_keys() -> None:
    key = keys.key_of("state", "up.weight/exp_avg")
    assert (key, keys.kind_of(key), keys.name_of(key)) == ("state:up.weight/exp_avg", "state", "up.weight/exp_avg")
    assert keys.is_a(key, "parameter", "state") and not keys.is_a(key, "parameter")
    assert keys.name_of(keys.key_of("gradient", "input:x")) == "input:x"
    assert not keys.is_a("state", "state") and not keys.is_a("", "state"), "these are no keys"
