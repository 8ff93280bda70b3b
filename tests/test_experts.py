"""Routed experts of stock models: what `tp` splits of them, and what that communicates."""

from __future__ import annotations

from functools import cache

import torch

from meshc import ir, summary, work
from meshc.program import Program
from tests.captured import Captured
from tests.zoo.run import case


@cache
def source() -> Captured:
    return Captured(case("qwen3_moe"), train=True, double=True)


@cache
def program(mesh: str) -> Program:
    return source().program(mesh)


def of_experts(found: Program, phase: str) -> list[tuple[str, str]]:
    """(collective, the operator that it is for) of the experts of both layers."""
    uses = [use for use in summary.collectives(found) if use.source.module.endswith("mlp.experts") and use.phase == phase]
    return [(use.kind, use.reason.partition(" of ")[0]) for use in uses]


def test_one_all_reduce_a_layer_each_way() -> None:
    """Gate and up make the hidden dim of the experts, down sums over it; backward the other way round."""
    found = program("tp=2")
    assert of_experts(found, "forward") == [("all_reduce", "grouped_mm")] * 2
    assert of_experts(found, "backward") == [("all_reduce", "gradient grouped_mm")] * 2


def test_the_hidden_dim_of_the_experts_is_what_lies_split() -> None:
    found = program("tp=3")
    gate_up, down = (
        found.port(f"parameter:model.layers.0.mlp.experts.{name}").sharding for name in ("gate_up_proj", "down_proj")
    )
    assert gate_up is not None and down is not None
    assert [[part.axes for part in dim] for dim in gate_up.dims] == [[()], [(), ("tp",)], [()]]
    assert [[part.axes for part in dim] for dim in down.dims] == [[()], [()], [("tp",)]]


def test_all_arithmetic_of_the_experts_is_split() -> None:
    rows = [row for row in work.of(program("tp=2")) or [] if row.operator.startswith("meshc.grouped")]
    assert {(row.operator, row.phase) for row in rows} == {
        ("meshc.grouped_mm", "forward"), ("meshc.grouped_mm", "backward"), ("meshc.grouped_outer", "backward"),
    }  # fmt: skip
    assert {row.by_axis["tp"] for row in rows} == {work.SPLIT}


def test_experts_in_bfloat16_come_to_the_same_operator() -> None:
    """There torch's own grouped product is what a stock model calls."""
    stock = case("qwen3_moe")
    stock.model.bfloat16()
    nodes = list(ir.calls(Captured(stock, train=True, double=False).draft.the_graph()))
    called = [ir.op_name(node) for node in nodes if "grouped" in ir.op_name(node)]
    assert sorted(called) == ["meshc.grouped_mm"] * 8 + ["meshc.grouped_outer"] * 4
    assert {ir.record(node).dtype for node in nodes if "grouped" in ir.op_name(node)} == {torch.bfloat16}
