"""Regions: what is compiled together, when gathers of parameters start, what travels together, and what runs by itself."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.fx import Graph, Node

import meshc
from meshc.check import check_program
from meshc.ir import Record, record, set_record, spmd
from meshc.ir.graph import descendants_of
from meshc.ir.regions import region_of
from meshc.passes.lower.group_regions import group_stage, levels
from meshc.passes.lower.schedule_collectives import schedule_stage
from meshc.program.packing import is_view
from meshc.program.program import Stage
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage, side_table
from tests import models
from tests.broad import broad
from tests.passes.stepped import around, body, changed

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
    """Levels of gathers, each a message, and of products."""
    schedule_stage(stage, {"dp": 2}, alone=0, window=window)
    found = levels(stage, window)
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


def test_windows_that_travel_together_keep_their_levels() -> None:
    """Three messages for six weights, two of which start at once; what is cut from one is of the level of its first reader, what is joined
    of the message's own."""
    stage = layers(6)
    schedule_stage(stage, {"dp": 2}, alone=1024, window=2 * BYTES)
    stage = group_stage(stage, {"dp": 2}, 2 * BYTES)
    gathers = [node for node in stage.graph.nodes if node.target is spmd.all_gather]
    assert [node.meta["meshc"].shape for node in gathers] == [(2 * 2 * 8,)] * 3
    assert [region_of(node) for node in stage.graph.nodes if node.target is aten.mm.default] == [1, 1, 2, 2, 3, 3]
    assert [region_of(node) for node in stage.graph.nodes if node.target is aten.cat.default] == [0, 0, 1]
    order = [node for node in stage.graph.nodes if node.target in (spmd.all_gather, aten.mm.default)]
    assert [node.target is spmd.all_gather for node in order] == [True, True, False, False, True, *[False] * 4]


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).mean()


def sgd(model: nn.Module) -> meshc.TrainStep:
    return meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_step_in_regions() -> None:
    before, after = around("regions", sgd(Affine()), "dp=2", backend="inductor", x=torch.zeros(4, 4))
    assert_expected_inline(
        body(after),
        """\
coordinate: "int" = coordinate("dp")
with region(0):
    shard: "f32[batch 4/dp, scale.0 4] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
    mul_tensor: "f32[batch 4/dp, scale.0 4]" = aten.mul.Tensor(shard, scale)
    add_tensor: "f32[batch 4/dp, scale.0 4]" = aten.add.Tensor(mul_tensor, shift)
    sum_default: "f32[]" = aten.sum(add_tensor)
    mul_tensor_1: "f32[] partial(sum: dp)" = aten.mul.Tensor(sum_default, 0.0625)
    full_default: "f32[] whole" = aten.full([], 1.0, dtype=f32, device=cpu)
    expand_default: "f32[batch 4/dp, scale.0 4]" = aten.expand(full_default, [2, 4])
    div_scalar: "f32[batch 4/dp, scale.0 4]" = aten.div.Scalar(expand_default, 16)
    mul_tensor_2: "f32[batch 4/dp, scale.0 4]" = aten.mul.Tensor(div_scalar, shard)
    sum_dim_int_list: "f32[1, scale.0 4] partial(sum: dp)" = aten.sum.dim_IntList(mul_tensor_2, [0], True)
    reshape_default_2: "f32[1]" = aten.reshape(mul_tensor_1, [-1])
    reshape_default_3: "f32[4]" = aten.reshape(sum_dim_int_list, [-1])
    cat_default: "f32[5]" = aten.cat([reshape_default_2, reshape_default_3])
    expand_default_1: "f32[batch 4, scale.0 4]" = aten.expand(full_default, [4, 4])
    div_scalar_1: "f32[batch 4, scale.0 4]" = aten.div.Scalar(expand_default_1, 16)
    sum_dim_int_list_1: "f32[1, scale.0 4]" = aten.sum.dim_IntList(div_scalar_1, [0], True)
    reshape_default_1: "f32[scale.0 4]" = aten.reshape(sum_dim_int_list_1, [4])
    square_sum_default_1: "f32[] whole" = meshc.square_sum(reshape_default_1)
all_reduce_2: "f32[5]" = all_reduce(cat_default, ["dp"], "sum")
with region(1):
    reshape_default_4: "f32[1, 5]" = aten.reshape(all_reduce_2, [1, 5])
    slice_tensor: "f32[1, 1]" = aten.slice.Tensor(reshape_default_4, 1, 0, 1)
    reshape_default_5: "f32[] whole" = aten.reshape(slice_tensor, [])
    clone_default: "f32[] whole" = aten.clone(reshape_default_5)
    slice_tensor_1: "f32[1, 4]" = aten.slice.Tensor(reshape_default_4, 1, 1, 5)
    reshape_default_6: "f32[1, scale.0 4]" = aten.reshape(slice_tensor_1, [1, 4])
    reshape_default: "f32[scale.0 4]" = aten.reshape(reshape_default_6, [4])
    square_sum_default: "f32[] whole" = meshc.square_sum(reshape_default)
    add_tensor_1: "f32[] whole" = aten.add.Tensor(square_sum_default, square_sum_default_1)
    sqrt_default: "f32[] whole" = aten.sqrt(add_tensor_1)
sgd_plain_many__default: "int" = meshc.sgd_plain_many_([scale, shift], [reshape_default, reshape_default_1], number_0_lr, number_0_weight_decay, False)
return {
    "output:output": clone_default,
    "metric:grad_norm": sqrt_default,
    "parameter:scale": scale,
    "parameter:shift": shift,
}
""",
    )


def test_for_the_eager_backend_nothing_changes() -> None:
    assert changed(*around("regions", sgd(Affine()), "dp=2", x=torch.zeros(4, 4))) == ""


@pytest.mark.parametrize("mesh, plan, microbatches", [broad("dp=2", "zero1", 1), ("pp=2,dp_shard=2", None, 2)])
def test_programs_in_regions_mean_what_they_meant(mesh: str, plan: str | None, microbatches: int) -> None:
    """Updates before their new values are gathered, draws of each microbatch, reductions of sums and between stages."""
    case = models.nanogpt(batch=4, seq=8, hidden=16, layers=1, heads=4, vocab=13, dropout=0.1)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-2)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, backend="inductor")
    check_program(program.compiled, "the program")
    assert any(region_of(node) is not None for stage in program.compiled.stages.values() for node in stage.graph.nodes)
    for name, stage in program.compiled.stages.items():
        text = print_stage(stage, program.compiled)
        assert print_stage(parse_stage(text, side_table(stage)), program.compiled) == text, name
    assert meshc.verify(program).ok


@pytest.mark.broad
def test_what_backward_gathers_of_forward_is_not_gathered_in_forward() -> None:
    """The norms' sequences before gradients of weights: of all layers at once they would be most of what a rank holds."""
    case = models.nanogpt(batch=4, seq=8, hidden=16, layers=3, heads=4, vocab=13)
    step = meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=case.loss)
    program = meshc.compile(step, meshc.Mesh("tp=2"), kwargs=case.call_kwargs, plan="megatron_sp", backend="inductor")
    (stage,) = program.compiled.stages.values()
    at = {node: number for number, node in enumerate(stage.graph.nodes)}
    gathers = [node for node in at if node.target is spmd.all_gather and record(node).phase == "backward"]
    gathers = [node for node in gathers if record(node.all_input_nodes[0]).phase == "forward" or record(node.all_input_nodes[0]).again]
    spans = [(at[node], max(at[reader] for reader in descendants_of(node.users, is_view))) for node in gathers]
    assert len(spans) >= 6, spans
    alive = max(sum(start <= number <= end for start, end in spans) for number in at.values())
    assert alive <= 2, (alive, spans)
    assert meshc.verify(program).ok
