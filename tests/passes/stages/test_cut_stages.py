"""Stages: a step over a pipeline axis as graphs for each half of each stage, and what they send."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from meshc.errors import PlanError
from tests.passes.stepped import around, changed


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


def staged(mesh: str, splits: list[str] | None = None) -> tuple[str, str]:
    model = Two()
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), microbatches=2)
    return around(
        "stages",
        step,
        mesh,
        options=meshc.Options(pipeline=meshc.Pipelining(splits=splits, schedule="gpipe" if splits else None)),
        x=torch.zeros(4, 3),
    )


def test_halves_of_stages_and_what_they_send() -> None:
    assert_expected_inline(staged("pp=2", ["second"])[1], """\
@ranks("pp=2,mb=2")
def before_1():
    full_default: "f32[] whole" = aten.full([], 1.0, dtype=f32, device=cpu)
    expand_default: "f32[batch 4/mb, second.weight.0 3]" = aten.expand(full_default, [2, 3])
    t_default_2: "f32[second.weight.0 3, batch 4/mb]" = aten.t(expand_default)
    return {
        "value:expand_default": expand_default,
        "value:t_default_2": t_default_2,
    }
@ranks("pp=2,mb=2")
def forward_0(
    first_weight: "f32[ffn 3, first.weight.1 3]" = "parameter:first.weight",
    x: "f32[batch 4, first.weight.1 3]" = "input:x",
):
    coordinate: "int" = coordinate("mb")
    shard: "f32[batch 4/mb, first.weight.1 3] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
    t_default: "f32[first.weight.1 3, ffn 3]" = aten.t(first_weight)
    mm_default: "f32[batch 4/mb, ffn 3]" = aten.mm(shard, t_default)
    return {
        "flow:mm_default": mm_default,
    }
@ranks("pp=2,mb=2")
def forward_1(
    second_weight: "f32[second.weight.0 3, ffn 3]" = "parameter:second.weight",
    mm_default: "f32[batch 4/mb, ffn 3]" = "flow:mm_default",
):
    t_default_1: "f32[ffn 3, second.weight.0 3]" = aten.t(second_weight)
    mm_default_1: "f32[batch 4/mb, second.weight.0 3]" = aten.mm(mm_default, t_default_1)
    sum_default: "f32[] partial(sum: mb)" = aten.sum(mm_default_1)
    return {
        "part:sum_default": sum_default,
    }
@ranks("pp=2,mb=2")
def backward_0(
    x: "f32[batch 4, first.weight.1 3]" = "input:x",
    mm_default_3: "f32[batch 4/mb, ffn 3]" = "flow:mm_default_3",
):
    coordinate: "int" = coordinate("mb")
    shard: "f32[batch 4/mb, first.weight.1 3] pad(zero: 0.0)" = shard(x, 0, 2, coordinate)
    t_default_4: "f32[ffn 3, batch 4/mb]" = aten.t(mm_default_3)
    mm_default_4: "f32[ffn 3, first.weight.1 3] partial(sum: mb)" = aten.mm(t_default_4, shard)
    return {
        "part:mm_default_4": mm_default_4,
    }
@ranks("pp=2,mb=2")
def backward_1(
    second_weight: "f32[second.weight.0 3, ffn 3]" = "parameter:second.weight",
    expand_default: "f32[batch 4/mb, second.weight.0 3]" = "value:expand_default",
    t_default_2: "f32[second.weight.0 3, batch 4/mb]" = "value:t_default_2",
    mm_default: "f32[batch 4/mb, ffn 3]" = "flow:mm_default",
):
    t_default_1: "f32[ffn 3, second.weight.0 3]" = aten.t(second_weight)
    mm_default_2: "f32[second.weight.0 3, ffn 3] partial(sum: mb)" = aten.mm(t_default_2, mm_default)
    t_default_3: "f32[second.weight.0 3, ffn 3]" = aten.t(t_default_1)
    mm_default_3: "f32[batch 4/mb, ffn 3]" = aten.mm(expand_default, t_default_3)
    return {
        "flow:mm_default_3": mm_default_3,
        "part:mm_default_2": mm_default_2,
    }
def after_0(
    first_weight: "f32[ffn 3, first.weight.1 3]" = "parameter:first.weight",
    number_0_lr: "f64[] whole" = "number:0.lr",
    number_0_weight_decay: "f64[] whole" = "number:0.weight_decay",
    all_reduce: "f32[ffn 3, first.weight.1 3]" = "sum:mm_default_4",
):
    t_default_5: "f32[first.weight.1 3, ffn 3]" = aten.t(all_reduce)
    t_default_6: "f32[ffn 3, first.weight.1 3]" = aten.t(t_default_5)
    square_sum_default: "f32[] whole" = meshc.square_sum(t_default_6)
    all_reduce_3: "f32[] whole" = all_reduce(square_sum_default, ["pp"], "sum")
    sqrt_default: "f32[] whole" = aten.sqrt(all_reduce_3)
    sgd_plain_default: "f32[ffn 3, first.weight.1 3]" = meshc.sgd_plain(first_weight, t_default_6, number_0_lr, number_0_weight_decay, False)
    full_default: "f32[] whole" = aten.full([], 0, dtype=f32, device=cpu)
    broadcast: "f32[] whole" = broadcast(full_default, ["pp"], 1)
    return {
        "output:output": broadcast,
        "metric:grad_norm": sqrt_default,
        "parameter:first.weight": sgd_plain_default,
    }
def after_1(
    second_weight: "f32[second.weight.0 3, ffn 3]" = "parameter:second.weight",
    number_0_lr: "f64[] whole" = "number:0.lr",
    number_0_weight_decay: "f64[] whole" = "number:0.weight_decay",
    all_reduce_1: "f32[second.weight.0 3, ffn 3]" = "sum:mm_default_2",
    all_reduce_2: "f32[] whole" = "sum:sum_default",
):
    t_default_7: "f32[ffn 3, second.weight.0 3]" = aten.t(all_reduce_1)
    t_default_8: "f32[second.weight.0 3, ffn 3]" = aten.t(t_default_7)
    square_sum_default_1: "f32[] whole" = meshc.square_sum(t_default_8)
    all_reduce_3: "f32[] whole" = all_reduce(square_sum_default_1, ["pp"], "sum")
    sqrt_default: "f32[] whole" = aten.sqrt(all_reduce_3)
    sgd_plain_default_1: "f32[second.weight.0 3, ffn 3]" = meshc.sgd_plain(second_weight, t_default_8, number_0_lr, number_0_weight_decay, False)
    broadcast: "f32[] whole" = broadcast(all_reduce_2, ["pp"], 1)
    return {
        "output:output": broadcast,
        "metric:grad_norm": sqrt_default,
        "parameter:second.weight": sgd_plain_default_1,
    }
pipeline = "pp"
pipeline_schedule = [
    "0: F0.0 SEND:F0.0>1 RECV:B1.0>0 F0.1 SEND:F0.1>1 RECV:B1.1>0 B0.0 B0.1",
    "1: RECV:F0.0>1 RECV:F0.1>1 F1.0 F1.1 B1.0 SEND:B1.0>0 B1.1 SEND:B1.1>0",
]
messages = [
    message("B1>0", ["flow:mm_default_3"]),
    message("F0>1", ["flow:mm_default"]),
]
owners = [
    owner(0, ["parameter:first.weight"]),
    owner(1, ["parameter:second.weight"]),
]
shared = []
returned = []
starts = []
""")


def test_without_a_pipeline_axis_nothing_changes() -> None:
    assert changed(*staged("dp=2")) == ""


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match="third"):
        staged("pp=2", ["third"])
