"""Routed experts split by `ep`, or by any axis that a plan tells so: what lies where, what is sent, and that it equals one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
import torch
from torch import nn

import meshc
from meshc.ops.expert_groups import from_groups, group_choices, to_groups
from meshc.plan.expert_group_counts import groups_of
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram
from meshc.report import summary
from tests.broad import broad
from tests.models import Case
from tests.zoo.experts import FAMILIES, shallow

BOTH = "dp: experts@*.mlp.experts > batch\ntp: experts@*.mlp.experts > heads, ffn"


def case(family: str) -> Case:
    return FAMILIES[family].case(family)


def trained(found: Case, mesh: str, plan: str | None = None, **options: Any) -> meshc.Program:
    """A step with AdamW, whose eps is above the rounding of gradients that are zero in exact arithmetic."""
    optimizer = torch.optim.AdamW(found.model.parameters(), lr=1e-2, eps=1e-6)
    step = meshc.TrainStep(found.model, optimizer=optimizer, loss=lambda output: output.loss, clip_grad_norm=1.0)
    return meshc.compile(step, meshc.Mesh(mesh), plan=plan, options=meshc.Options(**options), kwargs=found.call_kwargs)


def program(family: str, mesh: str, plan: str | None = None) -> PlainProgram:
    found = trained(shallow(family), mesh, plan).compiled
    assert isinstance(found, PlainProgram)
    return found


def lies(found: PlainProgram, name: str) -> list[list[tuple[str, ...]]]:
    sharding = found.port(f"parameter:{name}").sharding
    assert sharding is not None
    return [[part.axes for part in dim] for dim in sharding.dims]


@pytest.mark.parametrize(
    "plan, path, count",
    [
        ("ep: experts > batch", "layers.0.mlp.experts", 4),
        ("ep: batch", "layers.0.mlp.experts", 1),
        ("ep: experts@*.1.mlp.experts > batch", "layers.0.mlp.experts", 1),
        ("ep: experts@*.1.mlp.experts > batch", "layers.1.mlp.experts", 4),
        ("ep: experts > batch\ntp: experts > ffn", "layers.0.mlp.experts", 8),
        ("tp: experts@attention > ffn", "layers.0.mlp.experts", 1),
    ],
)
def test_as_many_groups_as_ranks_of_the_axes_that_split_the_experts(plan: str, path: str, count: int) -> None:
    assert groups_of(Plan(plan), {"ep": 4, "tp": 2}, path) == count


def test_experts_lie_by_expert_and_all_else_is_as_of_data() -> None:
    compiled = trained(shallow("qwen2_moe"), "ep=2")
    found = compiled.compiled
    assert isinstance(found, PlainProgram)
    assert lies(found, "model.layers.0.mlp.experts.gate_up_proj") == [[("ep",)], [(), ()], [()]]
    assert lies(found, "model.layers.0.mlp.experts.down_proj") == [[("ep",)], [()], [()]]
    assert lies(found, "model.layers.0.mlp.gate.weight") == [[()], [()]]
    lines = str(compiled).splitlines()
    attention = [line for line in lines if "aten.mm(" in line and "self_attn.q_proj; " in line]
    assert attention and all("; ep: batch" in line for line in attention)


@pytest.mark.broad
def test_gradients_of_experts_are_not_added_up_over_the_axis_that_splits_them() -> None:
    uses = [use for use in summary.collectives(program("qwen2_moe", "dp=2,ep=2")) if "gradient group_outer" in use.reason]
    assert uses and all(use.axes == ("dp",) for use in uses)


def test_a_plan_splits_experts_over_axes_that_attention_has_for_itself() -> None:
    found = trained(shallow("mixtral"), "dp=2,tp=2", BOTH).compiled
    assert isinstance(found, PlainProgram)
    assert lies(found, "model.layers.0.mlp.experts.down_proj") == [[("dp", "tp")], [()], [()]]
    assert [axes for dim in lies(found, "model.layers.0.self_attn.q_proj.weight") for axes in dim if axes] == [("tp",)]


@pytest.mark.parametrize("family, make", [broad("mixtral", shallow), broad("qwen3_moe", case), broad("gpt_oss", case)])
def test_inference_and_autograd_equal_one_device(family: str, make: Callable[[str], Case]) -> None:
    found = make(family)
    assert meshc.verify(meshc.compile(found.model.eval(), meshc.Mesh("dp=2,ep=2"), kwargs=found.call_kwargs), dtype=torch.float64).ok


def test_what_a_group_was_not_handed_is_neither_read_nor_counted() -> None:
    own = group_choices(torch.tensor([[0, 1], [2, 3], [3, 0]]), 2, 2, 2, 0)[0]
    rows = to_groups(torch.tensor([[1.0], [nan], [3.0]]), own)
    assert rows[0, :, :, 0].tolist() == [[1.0, 1.0], [0.0, 0.0], [3.0, 0.0]]
    blank = torch.where((own >= 0).unsqueeze(3), torch.ones(2, 3, 2, 1), nan)
    assert from_groups(blank, own).tolist() == [[2.0]] * 3


def test_a_choice_of_one_expert_twice_is_no_silent_loss() -> None:
    """Where a group has fewer experts than a token chooses, its rows are as many as it has."""
    with pytest.raises(RuntimeError, match="a token has chosen an expert twice: more than 1 of a group of 1"):
        group_choices(torch.tensor([[0, 1], [1, 1]]), 2, 1, 1, 0)


@pytest.mark.parametrize(
    "plan, said", [(None, "`ep: experts > batch` (role ep, recipe experts)"), ("ep: experts", "line 1, `ep: experts`")]
)
def test_a_model_without_experts_is_refused_with_advice(plan: str | None, said: str) -> None:
    with pytest.raises(meshc.PlanError, match=re.escape(said)) as raised:
        meshc.compile(nn.Linear(4, 4), meshc.Mesh("ep=2"), plan=plan, args=(torch.randn(4, 4),))
    assert "no routed experts" in str(raised.value) and "what to do: use these ranks as dp or tp" in str(raised.value)
