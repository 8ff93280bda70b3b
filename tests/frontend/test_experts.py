"""Routed experts: what the axes split of stock ones, what that communicates, and what other ways to write them come to."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations import moe

import meshc
from meshc import ir
from meshc.cost import divided_work
from meshc.frontend.libraries.stock_experts import REPLACED, unsorted_experts
from meshc.program.program import PlainProgram
from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.models import Case
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401
from tests.zoo.run import case


@cache
def source() -> Captured:
    return Captured(case("qwen3_moe"), train=True, double=True)


@cache
def program(mesh: str) -> PlainProgram:
    return source().program(mesh)


def of_experts(found: PlainProgram, phase: str) -> list[tuple[str, int]]:
    """(collective, bytes) of what the experts of both layers make, beside what their router does."""
    uses = [use for use in summary.collectives(found) if "mlp.experts" in use.reason and use.phase == phase]
    return [(use.kind, use.bytes_per_rank) for use in uses]


def operators(captured: Captured) -> list[str]:
    """The products of rows in a captured graph."""
    names = [ir.op_name(node) for node in ir.calls(captured.traced.operators().graph)]
    return [name for name in names if name.startswith("meshc.") and name.endswith("_mm")]


def test_one_all_reduce_a_layer_each_way() -> None:
    """Gate and up make the hidden dim of the experts, down sums over it; backward the other way round. One row a token is sent, not two.

    Backward, the gradient of the weights that a token gives its two experts travels along.
    """
    tokens, hidden, chosen, bytes_each = 4 * 12, 32, 2, 8
    assert of_experts(program("tp=2"), "forward") == [("all_reduce", tokens * hidden * bytes_each)] * 2
    assert of_experts(program("tp=2"), "backward") == [("all_reduce", tokens * (hidden + chosen) * bytes_each)] * 2


def test_the_hidden_dim_of_the_experts_is_what_lies_split() -> None:
    found = program("tp=3")
    gate_up, down = (
        found.port(f"parameter:model.layers.0.mlp.experts.{name}").sharding for name in ("gate_up_proj", "down_proj")
    )
    assert gate_up is not None and down is not None
    assert [[part.axes for part in dim] for dim in gate_up.dims] == [[()], [(), ("tp",)], [()]]
    assert [[part.axes for part in dim] for dim in down.dims] == [[()], [()], [("tp",)]]


def test_all_arithmetic_of_the_experts_is_split_by_tokens_and_by_their_hidden_dim() -> None:
    rows = [row for row in divided_work.work_rows(program("dp=2,tp=2")) or [] if row.operator.startswith("meshc.routed")]
    assert {(row.operator, row.phase) for row in rows} == {
        ("meshc.routed_mm", "forward"), ("meshc.routed_mm", "backward"), ("meshc.routed_outer", "backward"),
    }  # fmt: skip
    assert {tuple(row.by_axis.values()) for row in rows} == {(divided_work.SPLIT, divided_work.SPLIT)}


def test_no_token_leaves_its_rank_for_an_expert() -> None:
    uses = [use for use in summary.collectives(program("dp=2,tp=2")) if ".mlp" in use.source.module and use.phase != "update"]
    between = [use for use in uses if "dp" in use.axes]
    assert len(between) < len(uses)
    for use in between:  # how often each of four experts was chosen, of at most two layers at once
        assert use.kind == "all_reduce" and use.reason.count("for the program's output") in (1, 2) and use.bytes_per_rank <= 2 * 4 * 8, use


class Grouped(nn.Module):
    """Experts of one product each, over rows that are sorted already; torch's own function for it, or what stock models fall back to."""

    def __init__(self, fallback: bool) -> None:
        super().__init__()
        self.fallback = fallback
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 16) / 4), nn.Parameter(torch.randn(3, 16, 8) / 4)

    def forward(self, x: Tensor, choice: Tensor) -> Tensor:
        ends = torch.histc(choice.to(x.dtype), 3, 0, 2).cumsum(0).to(torch.int32)
        product = torch.ops.transformers.grouped_mm_fallback if self.fallback else F.grouped_mm
        return product(F.silu(product(x, self.up, offs=ends)), self.down, offs=ends)


@pytest.mark.parametrize("mesh", ["dp=2,tp=3", broad("tp=2"), broad("tp=3")])
@pytest.mark.parametrize("fallback", [False, True])
def test_products_of_runs(fallback: bool, mesh: str) -> None:
    """torch's own are traced in bfloat16 only."""
    torch.manual_seed(0)
    model, dtype = (Grouped(fallback), torch.float32) if fallback else (Grouped(fallback).bfloat16(), torch.bfloat16)
    inputs = {"x": torch.randn(8, 8).to(dtype), "choice": torch.tensor([0, 0, 0, 2, 2, 2, 2, 2])}
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    found = meshc.compile(step, meshc.Mesh(mesh), kwargs=inputs)
    assert meshc.verify(found, dtype=torch.float64 if fallback else None).ok
    rows = [row for row in divided_work.work_rows(found.compiled) or [] if row.operator in ("meshc.grouped_mm", "meshc.grouped_outer")]
    assert rows and {row.by_axis["tp"] for row in rows} == {divided_work.SPLIT}
    assert not any("has no rule" in note for note in found.compiled.notes)


@pytest.mark.parametrize("implementation", [name if name == "grouped_mm" else broad(name) for name in REPLACED])
def test_stock_experts_of_any_implementation_come_to_the_same(implementation: str) -> None:
    """Also the loop over experts that a token is found for, which has no graph of its own."""
    stock = case("qwen3_moe")
    for module in stock.model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = implementation
    captured = Captured(Case("qwen3_moe", stock.model, stock.kwargs), train=True, double=True)
    assert operators(captured).count("meshc.routed_mm") == 8
    captured.verify_inference("tp=2", None) if implementation == "eager" else captured.verify_training("tp=2", None, sgd)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]


def test_stock_experts_are_as_they_were_after_tracing() -> None:
    table, mine = moe.ALL_EXPERTS_FUNCTIONS, copy.copy
    before = dict(table)
    table["batched_mm"] = mine
    try:
        with unsorted_experts():
            assert all(table[name] is not before.get(name, mine) for name in REPLACED)
        assert dict(table) == {**before, "batched_mm": mine}
    finally:
        del table["batched_mm"]
    assert dict(table) == before


@pytest.mark.broad
def test_experts_in_bfloat16_come_to_the_same_operators() -> None:
    stock = case("qwen3_moe")
    stock.model.bfloat16()
    nodes = [node for node in ir.calls(Captured(stock, train=True, double=False).traced.operators().graph) if "routed" in ir.op_name(node)]
    assert sorted(map(ir.op_name, nodes)) == ["meshc.routed_mm"] * 8 + ["meshc.routed_outer"] * 4
    assert {ir.record(node).dtype for node in nodes} == {torch.bfloat16}


def test_experts_that_are_spread_already_are_refused_with_advice() -> None:
    found = case("qwen3_moe")
    for module in found.model.modules():
        if hasattr(module, "_is_expert_parallel"):
            module._is_expert_parallel = True  # type: ignore[assignment]
    with pytest.raises(meshc.CaptureError, match="already spread the experts (.|\n)* what to do: build it without transformers' own"):
        meshc.compile(found.model, meshc.Mesh("tp=2"), kwargs=found.call_kwargs)
