"""Values made in each other's memory: what a stage's function gives is what its text says, call after call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from meshc.cost import peak_memory
from meshc.ir import Record, set_record, spmd
from meshc.ir.mesh import Mesh
from meshc.passes.lower.group_regions import group_stage
from meshc.passes.lower.share_memory import share_stage_memory
from meshc.plan.plan import Plan
from meshc.program import packing
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.codegen import generate
from meshc.runtime.run.inductor import compile_regions
from tests.broad import broad

aten = torch.ops.aten


def call(graph: Graph, target: object, *args: object, shape: tuple[int, ...]) -> Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    set_record(node, Record(shape, torch.float32))
    return node


def joined(escaping: bool) -> Stage:
    """flat = cat(x @ x, exp(x)), of which the sum is returned, or the tensor itself."""
    graph = Graph()
    x = graph.placeholder("x")
    set_record(x, Record((4, 4), torch.float32))
    first = call(graph, aten.mm.default, x, x, shape=(4, 4))
    second = call(graph, aten.exp.default, x, shape=(4, 4))
    flat = [call(graph, aten.reshape.default, value, [-1], shape=(16,)) for value in (first, second)]
    whole = call(graph, aten.cat.default, flat, shape=(32,))
    part = call(graph, aten.slice.Tensor, whole, 0, 8, 24, shape=(16,))
    graph.output([part if escaping else call(graph, aten.sum.default, part, shape=())])
    return Stage("main", graph, ("input:x",), ("output:y",))


def compiled(stage: Stage):  # type: ignore[no-untyped-def]
    return generate(share_stage_memory(stage), Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu"))


def expected(x: Tensor) -> Tensor:
    return torch.cat([(x @ x).reshape(-1), x.exp().reshape(-1)])[8:24]


def test_both_parts_are_made_inside() -> None:
    stage = joined(escaping=False)
    places = {node.name: (piece.start, piece.size) for node, piece in packing.pieces(share_stage_memory(stage).graph).items()}
    assert places == {"mm_default": (0, 16), "reshape_default": (0, 16), "exp_default": (16, 16), "reshape_default_1": (16, 16)}


def test_the_same_memory_serves_each_call() -> None:
    run = compiled(joined(escaping=False))
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run([x])[0], expected(x).sum())


def test_results_that_share_the_memory_outlive_the_next_call() -> None:
    """Gradients that a backward returns are the user's from then on."""
    run = compiled(joined(escaping=True))
    xs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    results = [run([x])[0] for x in xs]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, expected(x))


def test_what_gives_back_its_operand_does_not_hide_that_it_leaves() -> None:
    """A mask of a tile that has no padding is the tile itself."""
    stage = joined(escaping=True)
    (output,) = stage.graph.find_nodes(op="output")
    with stage.graph.inserting_before(output):
        masked = call(stage.graph, spmd.mask, output.args[0][0], 0, 16, 0.0, shape=(16,))
    output.args = ([masked],)
    run = compiled(stage)
    xs = [torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    results = [run([x])[0] for x in xs]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, expected(x))


def test_a_value_that_something_else_reads_is_made_apart() -> None:
    stage = joined(escaping=False)
    (output,) = stage.graph.find_nodes(op="output")
    first = next(node for node in stage.graph.nodes if node.name == "mm_default")
    output.args = ([*output.args[0], first],)
    assert packing.pieces(share_stage_memory(stage).graph) == {}
    x = torch.randn(4, 4)
    total, product = compiled(Stage("main", stage.graph, stage.inputs, ("output:y", "output:z")))([x])
    torch.testing.assert_close(product, x @ x)
    torch.testing.assert_close(total, expected(x).sum())


@pytest.mark.parametrize("escaping,peak", [(False, 128 + 4), (True, 128)])
def test_the_memory_walk_counts_the_whole_once(escaping: bool, peak: int) -> None:
    """The whole is 128 bytes; a part that is on its way there counts as workspace, which is not counted."""
    stage = joined(escaping)
    ports = (Port("input", "x", (4, 4), torch.float32),)
    results = (Port("output", "y", (16,) if escaping else (), torch.float32),)
    runs = (Instruction("run", "main"),)
    program = PlainProgram({"main": share_stage_memory(stage)}, Mesh("dp=2"), Plan(""), ports, results, runs, axis_sizes={"dp": 2})
    assert peak_memory.peak(program).total == peak


def reduced(escaping: bool) -> Stage:
    """The sum of an all-reduced outer product of 8 MiB, or the product itself."""
    graph = Graph()
    x = graph.placeholder("x")
    set_record(x, Record((2048, 1), torch.float32))
    row = call(graph, aten.slice.Tensor, call(graph, aten.t.default, x, shape=(1, 2048)), 1, 0, 1024, shape=(1, 1024))
    product = call(graph, aten.mm.default, x, row, shape=(2048, 1024))
    whole = call(graph, spmd.all_reduce, product, ["dp"], "sum", shape=(2048, 1024))
    graph.output([whole if escaping else call(graph, aten.sum.default, whole, shape=())])
    return Stage("main", graph, ("input:x",), ("output:y",))


def alone() -> Groups:
    groups = Groups({"dp": 1}, 0, 1)
    groups.prepare([("dp",)])
    return groups


@pytest.mark.parametrize("make", [generate, broad(compile_regions)])
def test_a_large_gradient_has_the_same_memory_at_each_call(make) -> None:  # type: ignore[no-untyped-def]
    run = make(share_stage_memory(group_stage(reduced(escaping=False), {"dp": 1})), alone(), {"dp": 0}, torch.device("cpu"))
    for seed in range(3):
        x = torch.randn(2048, 1, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(run([x])[0], (x @ x[:1024].t()).sum(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("make", [generate, compile_regions])
def test_but_not_if_it_leaves(make) -> None:  # type: ignore[no-untyped-def]
    stage = reduced(escaping=True)
    assert not any(packing.stays(node) for node in stage.graph.nodes)
    run = make(share_stage_memory(group_stage(stage, {"dp": 1})), alone(), {"dp": 0}, torch.device("cpu"))
    xs = [torch.randn(2048, 1, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    results = [run([x])[0] for x in xs]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, x @ x[:1024].t())


def test_what_stays_counts_for_the_whole_stage() -> None:
    stage = reduced(escaping=False)
    assert [node.name for node in stage.graph.nodes if packing.stays(node)] == ["mm_default"]
    ports = (Port("input", "x", (2048, 1), torch.float32),)
    results = (Port("output", "y", (), torch.float32),)
    runs = (Instruction("run", "main"),)
    program = PlainProgram({"main": share_stage_memory(stage)}, Mesh("dp=1"), Plan(""), ports, results, runs, axis_sizes={"dp": 1})
    assert peak_memory.peak(program).total == 8 * 1024 * 1024 + 4


@pytest.mark.parametrize("target, shape", [(aten.reshape.default, [16]), (aten.view.default, [16]), (aten._unsafe_view.default, [16])])
def test_a_reduction_over_a_reshape_overwrites_new_memory_and_no_input(target: object, shape: list[int]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    set_record(x, Record((4, 4), torch.float32))
    for value, allowed in ((x, False), (call(graph, aten.exp.default, x, shape=(4, 4)), True)):
        view = call(graph, target, value, shape, shape=(16,))
        assert packing.may_overwrite(call(graph, spmd.all_reduce, view, ["dp"], "sum", shape=(16,))) is allowed
