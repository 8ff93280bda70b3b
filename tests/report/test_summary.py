"""The summary's figures, against ones that can be worked out by hand."""

from __future__ import annotations

import re
import tempfile

import pytest
import torch
from torch.fx import Graph

import meshc
from meshc import ir
from meshc.artifact import load, save
from meshc.cost import divided_work, peak_memory
from meshc.cost.flops import flops
from meshc.ir import Record, spmd
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, local_shape
from meshc.ir.sharing import OVER_OPERAND, set_sharing
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Port, Stage
from meshc.report.summary import collapse_layers, collectives, gradient_shardings, summary
from tests.models import mlp, nanogpt

aten = torch.ops.aten
MLP_BYTES = 4 * (2 * 24 + 40 * 24 + 40 + 40 * 40 + 40 + 10 * 40 + 10)


def step(case, mesh: str, plan: str, **options) -> meshc.Program:  # type: ignore[no-untyped-def]
    optimizer = torch.optim.AdamW(case.model.parameters())
    made = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, **options)
    return meshc.compile(made, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan)


def test_phases_of_a_module_are_those_of_its_stages() -> None:
    """The sum that makes the output whole is forward's, although it is made after the last gradient."""
    case = mlp()
    program = meshc.compile(case.model, meshc.Mesh("dp=2,tp=2"), kwargs=case.kwargs)
    found = collectives(program.compiled)
    assert {(use.stage, use.phase) for use in found} == {("forward", "forward"), ("backward", "backward")}
    (output,) = [use for use in found if use.kind == "all_reduce" and use.stage == "forward"]
    assert "for the program's output" in output.reason
    assert re.search(r"forward\s+all_reduce\s+tp\s+1 ", program.summary())


def cell(table: str, row: str, column: str) -> str:
    """A cell of the first table line that begins with `row`."""
    lines = table.splitlines()
    index = next(i for i, line in enumerate(lines) if re.match(rf"\s*{re.escape(row)}\s\s", line))
    rule = next(i for i in range(index, 0, -1) if lines[i].lstrip().startswith("---"))
    spans = [match.span() for match in re.finditer("-+", lines[rule])]
    named = {lines[rule - 1][a:b].strip(): (a, b) for a, b in spans}
    a, b = named[column]
    return lines[index][a:b].strip()


def test_data_parallel_sends_the_bytes_of_each_gradient_once() -> None:
    uses = collectives(step(mlp(), "dp=2", "ddp").compiled)
    assert {(use.kind, use.axes, use.times) for use in uses} == {("all_reduce", ("dp",), 1)}
    scalars = 16  # the loss, and at most its count
    assert MLP_BYTES <= sum(use.bytes_per_rank for use in uses) <= MLP_BYTES + scalars


def test_a_microbatch_repeats_what_lies_inside_it() -> None:
    program = step(mlp(), "tp=2", "megatron", microbatches=3)
    inside = [use for use in collectives(program.compiled) if use.stage == "each"]
    assert inside and {use.times for use in inside} == {3}
    assert {use.times for use in collectives(program.compiled) if use.stage == "after"} <= {1}


def test_fsdp_keeps_half_of_everything_on_each_of_two_ranks() -> None:
    program = step(mlp(), "dp=2", "fsdp")
    told = program.summary()
    assert cell(told, "up.weight", "sharding") in ("[ffn 40/dp, hidden 24]", "[ffn 40, hidden 24/dp]")
    assert cell(told, "parameters", "bytes/rank") == f"{MLP_BYTES / 2000:.1f} kB"
    assert all(sharding.split_axes() == {"dp"} for sharding in gradient_shardings(program.compiled).values())
    assert cell(told, "parameters", "padding") == ""


def test_storage_of_gradients_and_state_is_shown_where_it_differs() -> None:
    told = step(mlp(), "dp=2", "zero2").summary()
    assert cell(told, "up.weight", "sharding") == "[ffn 40, hidden 24]"
    assert cell(told, "up.weight", "its gradient") == cell(told, "up.weight", "its state")
    assert cell(told, "up.weight", "its state").count("/dp") == 1
    assert "its gradient" not in step(mlp(), "dp=2", "ddp").summary()


def test_repeated_layers_are_one_row() -> None:
    told = step(nanogpt(), "tp=2", "megatron").summary()
    assert cell(told, "h.*.attn.c_attn.weight", "count") == "2"
    assert cell(told, "h.*.attn.c_attn.weight", "sharding") == "[3 * heads 4/tp * head 8, hidden 32]"
    assert cell(told, "h.*.mlp.0.weight", "sharding") == "[ffn 128/tp, hidden 32]"
    assert cell(told, "h.*.mlp.0.weight", "DTensor over (tp)") == "Shard(0)"
    assert cell(told, "h.*.mlp.2.weight", "DTensor over (tp)") == "Shard(1)"
    assert cell(told, "ln_f.weight", "DTensor over (tp)") == "Replicate"
    assert collapse_layers("h.3.mlp.0.weight") == "h.*.mlp.0.weight" and collapse_layers("c_fc1.weight") == "c_fc1.weight"


def test_padding_is_counted() -> None:
    told = step(mlp(width=41), "tp=2", "megatron").summary()
    whole = 4 * (2 * 24 + 41 * 24 + 41 + 41 * 41 + 41 + 10 * 41 + 10)
    assert cell(told, "parameters", "padding") not in ("", "0.0 %")
    assert whole / 2 < memory_of(told, "parameters") < whole


def memory_of(table: str, row: str) -> float:
    number, unit = cell(table, row, "bytes/rank").split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


def test_an_axis_that_splits_no_product_repeats_it() -> None:
    case = mlp()
    told = step(case, "dp=2,tp=2", "dp: batch\ntp: -").summary()
    assert cell(told, "dp", "of the arithmetic split") == "100 %" and cell(told, "tp", "of the arithmetic split") == "0 %"
    assert "do 2.00 times that" in told


def test_shares_of_work_can_be_worked_out_by_hand() -> None:
    """x [6, 24] @ [24, 40] @ [40, 40] @ [40, 10]: the classes are a factor of the last product alone."""
    program = step(mlp(), "dp=2,tp=2", "dp: batch\ntp: vocab").compiled
    up, middle, down = (2 * 6 * product for product in (24 * 40, 40 * 40, 40 * 10))
    rows = divided_work.work_rows(program)
    total = 3 * (up + middle + down)  # forward, and one product each for the gradients of weight and input
    assert sum(row.flops for row in rows) == total
    assert divided_work.share(rows, "dp") == divided_work.share(rows, "dp", legal=True) == 1.0
    assert divided_work.share(rows, "tp") == pytest.approx(down * 3 / total)
    first = divided_work.largest_whole(rows, "tp", 1)[0]
    assert (first.module, first.operator, first.by_axis["tp"], first.flops) == ("middle", "aten.mm", "could be split", 2 * middle)
    told = program_summary_of_disk(program)
    assert "tp splits nothing of aten.mm backward in middle: " in told and "which another entry of the plan may split" in told


def program_summary_of_disk(program: PlainProgram) -> str:
    """The summary of the program after it was saved and loaded, which must be the same."""
    with tempfile.TemporaryDirectory() as folder:
        save(program, f"{folder}/program")
        told = summary(load(f"{folder}/program"))
    assert told == summary(program)
    return told


def test_a_program_without_rows_of_work_says_so() -> None:
    assert "not known" in summary(by_hand())


def test_factors_say_what_a_plan_can_name() -> None:
    told = step(nanogpt(), "tp=2", "megatron").factors()
    assert cell(told, "heads", "size") == "4" and cell(told, "heads", "classes") == "2"
    assert "h.*.attn.c_attn.weight[0]" in cell(told, "heads", "dims that have it")
    assert cell(told, "batch", "dims that have it") == "input:idx[0], input:targets[0]"


# A program by hand: x [8/dp, 100] of f32 on 2 ranks, 1600 bytes a rank.

ROWS = Part("rows", 8, ("dp",))
X = Sharding(((ROWS,), (Part("columns", 100),)))


def by_hand() -> PlainProgram:
    sizes = {"dp": 2}
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    a = graph.call_function(aten.relu.default, (x,))
    view = graph.call_function(aten.view.default, (a, [100, 4]))
    b = graph.call_function(aten.exp.default, (view,))
    c = graph.call_function(aten.mm.default, (view, w))
    d = graph.call_function(spmd.all_reduce, (c, ["dp"], "sum"))
    set_sharing(d, [OVER_OPERAND])
    graph.output((d, b))
    w_lies = Sharding(((ROWS,), (Part("f", 10),)))
    for node, shape, sharding in (
        (x, local_shape(X, sizes), X), (w, (4, 10), w_lies), (a, (4, 100), X), (view, (100, 4), None), (b, (100, 4), None),
        (c, (100, 10), None), (d, (100, 10), None),
    ):  # fmt: skip
        ir.set_record(node, Record(shape, torch.float32, sharding, reason="test"))
    ports = (Port("input", "x", (8, 100), torch.float32, X), Port("parameter", "w", (8, 10), torch.float32, w_lies))
    outputs = (Port("output", "d", (100, 10), torch.float32), Port("output", "b", (100, 4), torch.float32))
    stage = Stage("main", graph, ("input:x", "parameter:w"), ("output:d", "output:b"))
    return PlainProgram({"main": stage}, Mesh("dp=2"), Plan("dp: rows"), ports, outputs, (Instruction("run", "main"),), axis_sizes=sizes)


def test_the_peak_counts_each_storage_once_while_it_is_alive() -> None:
    peak = peak_memory.peak(by_hand())
    # a and b are 1600 bytes each, c is 4000, and all are alive when c is made; d is written over c
    assert (peak.total, peak.gradients) == (1600 + 1600 + 4000, 0)
    assert peak.at.startswith("mm")


def test_a_collective_counts_its_operand_and_a_product_its_local_work() -> None:
    program = by_hand()
    (use,) = collectives(program)
    assert (use.phase, use.kind, use.axes, use.bytes_per_rank, use.reason) == ("forward", "all_reduce", ("dp",), 4000, "test")
    product = next(node for node in program.stage.graph.nodes if node.target is aten.mm.default)
    assert flops(product) == 2 * 100 * 4 * 10
    told = summary(program)
    assert cell(told, "inputs", "bytes/rank") == "1.6 kB" and cell(told, "parameters", "bytes/rank") == "160 B"


@pytest.mark.parametrize("mode", ["forward", "autograd"])
def test_modules_have_a_summary_too(mode: str) -> None:
    case = mlp()
    with torch.set_grad_enabled(mode == "autograd"):
        program = meshc.compile(case.model, meshc.Mesh("dp=2"), kwargs=case.kwargs)
    told = program.summary()
    assert ("backward" in told) == (mode == "autograd")
    assert "work (matrix products" in told
