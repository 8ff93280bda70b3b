"""Each kind of damage that a pass could do to a graph's structure is seen, and said of the value that has it."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

from meshc import ir
from meshc.ir import spmd
from meshc.ir.graph import call, output_of, set_results
from meshc.ir.nodes import Record
from meshc.ir.sharding import Part, Sharding
from meshc.ir.verify_graph import MalformedGraph, verify_graph, verify_meetings

aten = torch.ops.aten
F32 = torch.float32
SIZES = {"dp": 2, "pp": 2}
SPLIT = Sharding(((Part("batch", 4, ("dp",)),), (Part("hidden", 8),)))
TILE = Record((2, 8), F32, SPLIT)
Damage = Callable[[Graph, dict[str, Node]], object]


def whole() -> tuple[Graph, dict[str, Node]]:
    """x -> y = relu(x), r = all_reduce(y), top = max(r) -> best = top[0] -> r, best"""
    graph = Graph()
    ir.set_record(graph.placeholder("x"), TILE)
    (x,) = graph.nodes
    y = call(graph, TILE, aten.relu.default, x)
    r = call(graph, TILE, spmd.all_reduce, y, ["dp"], "sum")
    one = Record((2,), F32)
    top = call(graph, (one, Record((2,), torch.int64)), aten.max.dim, r, 1)
    best = call(graph, one, operator.getitem, top, 0)
    graph.output((r, best))
    return graph, dict(x=x, y=y, r=r, top=top, best=best, end=output_of(graph))


def late(graph: Graph, at: dict[str, Node]) -> None:
    at["r"].append(at["y"])


def erased(graph: Graph, at: dict[str, Node]) -> None:
    at["y"].users.clear()
    graph.erase_node(at["y"])


def foreign(graph: Graph, at: dict[str, Node]) -> None:
    at["y"].args = (whole()[1]["x"],)


def forgotten(graph: Graph, at: dict[str, Node]) -> None:
    at["x"].users.clear()


def remembered(graph: Graph, at: dict[str, Node]) -> None:
    at["x"].users[at["best"]] = None


def entering_late(graph: Graph, at: dict[str, Node]) -> None:
    with graph.inserting_after(at["y"]):
        ir.set_record(graph.placeholder("z"), TILE)


def endless(graph: Graph, at: dict[str, Node]) -> None:
    graph.erase_node(at["end"])


def other_target(name: str, target: Callable[..., object]) -> Damage:
    return lambda graph, at: setattr(at[name], "target", target)


def other_args(name: str, *args: object) -> Damage:
    return lambda graph, at: setattr(at[name], "args", tuple(at.get(arg, arg) if isinstance(arg, str) else arg for arg in args))


def other_record(name: str, record: object) -> Damage:
    return lambda graph, at: at[name].meta.update({ir.KEY: record})


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a later value": (late, "it reads relu_default, which stands behind it"),
    "an erased value": (erased, "it reads relu_default, which has been erased"),
    "another graph's": (foreign, "it reads x, which is of another graph"),
    "a use not known": (forgotten, "x does not know that it is read here"),
    "a reader that is none": (remembered, "getitem counts as a reader and does not read it"),
    "a placeholder behind a call": (entering_late, "it enters the graph behind a call"),
    "no end": (endless, "the graph does not end in one output"),
    "too few results": (lambda graph, at: set_results(graph, [at["r"]]), "1 values leave the graph, and there are 2 ports for them"),
    "a result that is several": (
        lambda graph, at: set_results(graph, [at["r"], at["top"]]), "makes several values, and output reads them as one"
    ),
    "a result that is a number": (lambda graph, at: setattr(at["end"], "args", ((at["r"], 3),)), "result 1 is 3, and no single value"),
    "no record": (lambda graph, at: at["y"].meta.clear(), "it has no record"),
    "a record of another kind": (other_record("y", [TILE]), "its record is a list"),
    "a tile of another size": (other_record("y", Record((4, 8), F32, SPLIT)), r"its record says \[4, 8\], and the tile .* is \[2, 8\]"),
    "a dim too few": (other_record("y", Record((2,), F32, SPLIT)), r"its record says \[2\], and the tile .* is \[2, 8\]"),
    "a result that is not there": (other_args("best", "top", 2), "it reads result 2 of max_dim, which makes 2"),
    "a result of one": (other_args("best", "r", 0), "it reads result 0 of all_reduce, which makes one value"),
    "another result's type": (other_args("best", "top", 1), r"says float32 \[2\], and that of max_dim int64 \[2\]"),
    "several read as one": (other_target("best", aten.relu.default), "it makes several values, and getitem reads them as one"),
    "an argument too many": (other_args("y", "x", 1), "it has 2 arguments, and its operator takes 1 by position"),
    "an argument too few": (other_args("y"), "self is missing, which its operator takes"),
    "a tensor missing": (other_args("y", None), "self is None, and its operator takes a tensor there"),
    "an unknown argument": (lambda graph, at: at["y"].update_kwarg("beta", 1), "its operator takes no beta"),
    "no operator": (other_target("y", torch.relu), "which is no operator"),
    "an unknown axis": (other_args("r", "y", ["tp"], "sum"), r"it goes over \['tp'\], and the axes are dp, pp"),
    "an axis twice": (other_args("r", "y", ["dp", "dp"], "sum"), r"it goes over \['dp', 'dp'\]"),
    "a collective's shape": (other_args("r", "y", ["dp"], 0), r"says float32 \[2, 8\], and of float32 \[2, 8\] it makes \[4, 8\]"),
    "an integer sent": (other_args("r", 3, ["dp"], "sum"), "it takes a tensor to other ranks, not 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_said(name: str) -> None:
    damage, said = DAMAGES[name]
    graph, at = whole()
    verify_graph(graph, 1, 2, SIZES)
    if name == "a collective's shape":
        at["r"].target = spmd.all_gather
    damage(graph, at)
    with pytest.raises(MalformedGraph, match=said):
        verify_graph(graph, 1, 2, SIZES)


def test_ports_are_counted_and_one_device_has_no_collectives() -> None:
    graph, _ = whole()
    with pytest.raises(MalformedGraph, match="1 values enter the graph, and there are 2 ports for them"):
        verify_graph(graph, 2, 2, SIZES)
    alone = Graph()
    ir.set_record(alone.placeholder("x"), Record((4, 8), F32, SPLIT))
    (x,) = alone.nodes
    call(alone, Record((4, 8), F32), spmd.all_reduce, x, ["dp"], "sum")
    alone.output((x,))
    with pytest.raises(MalformedGraph, match="a graph of one device has no collectives"):
        verify_graph(alone, 1, 1)


def after(*reductions: str) -> Graph:
    graph = Graph()
    ir.set_record(graph.placeholder("x"), Record((3,), F32))
    (x,) = graph.nodes
    for reduction in reductions:
        x = call(graph, Record((3,), F32), spmd.all_reduce, x, ["pp"], reduction)
    graph.output((x,))
    return graph


def test_ranks_of_a_pipeline_meet_in_one_order() -> None:
    verify_meetings({"after_0": after("sum", "max"), "after_1": after("sum", "max")}, [["after_0"], ["after_1"]])
    with pytest.raises(MalformedGraph, match="after_0 and after_1 meet in different collectives at all_reduce"):
        verify_meetings({"after_0": after("sum", "max"), "after_1": after("max", "sum")}, [["after_0"], ["after_1"]])
    with pytest.raises(MalformedGraph, match="before_1, after_1 meet in 1 and 2 collectives"):
        graphs = {"after_0": after("sum"), "before_1": after("sum"), "after_1": after("max")}
        verify_meetings(graphs, [["after_0"], ["before_1", "after_1"]])
