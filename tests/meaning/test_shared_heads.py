"""Fewer key-value heads than ranks: an axis is taken apart, each rank has the one head that its queries need, and nothing is padded."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import pytest
import torch
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM

import meshc
from meshc.cost.padding_waste import padding
from meshc.ir.sharding import local_shape
from meshc.report import summary
from tests.broad import broad

ROWS, SEQ, HEAD = 8, 16, 4
"""Sizes that all meshes divide: what is padded would be of the heads."""


@cache
def model(heads: int, shared: int, layers: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=48, hidden_size=heads * HEAD, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=shared, max_position_embeddings=SEQ,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def compiled(mesh: str, plan: str | None, heads: int, shared: int, layers: int = 1, **how: Any) -> meshc.Program:
    own = model(heads, shared, layers)
    step = meshc.TrainStep(own, optimizer=torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9), **how)
    ids = torch.randint(48, (ROWS, SEQ))
    return meshc.compile(step, meshc.Mesh(mesh), plan=plan, kwargs={"input_ids": ids, "labels": ids})


CASES = [
    ("tp=4", None, 8, 2, "tp_kv_heads=2,tp_group=2"),
    broad("tp=4", "megatron_sp", 4, 2, "tp_kv_heads=2,tp_group=2"),
    broad("tp=8", None, 8, 2, "tp_kv_heads=2,tp_group=4"),
    broad("tp=6", None, 6, 3, "tp_kv_heads=3,tp_group=2"),
    broad("dp=2,tp=4", "fsdp+megatron_sp", 8, 2, "dp=2,tp_kv_heads=2,tp_group=2"),
    broad("dp_shard=2,tp=4", None, 4, 2, "dp_shard=2,tp_kv_heads=2,tp_group=2"),
    broad("sp=4", None, 4, 2, "sp_kv_heads=2,sp_group=2"),
    broad("cp=4", None, 4, 2, "cp_kv_heads=2,cp_group=2"),
    broad("tp=4", "tp: heads, ffn, vocab; store params, grads, state", 4, 2, "tp_kv_heads=2,tp_group=2"),
]


@pytest.mark.parametrize("mesh, plan, heads, shared, wanted", CASES)
def test_a_step_is_the_models_own(mesh: str, plan: str | None, heads: int, shared: int, wanted: str) -> None:
    program = compiled(mesh, plan, heads, shared)
    assert str(program.mesh) == wanted == str(program.compiled.mesh)
    assert any("taken apart into" in note for note in program.compiled.notes)
    assert not padding(program.compiled)
    report = meshc.verify(program, dtype=torch.float64)
    assert report.worst < 1e-10 and {"gradient", "parameter after step 2"} <= {kind for kind, _, _ in report.rows}


def test_where_heads_lie_and_what_is_sent() -> None:
    """Of weights of keys and values a rank has its one head, of all others a quarter. Over the group gradients of the keys and values of
    its tokens are summed, and nothing else; all other messages are those of a model with a head of keys for each rank."""
    program, other = compiled("tp=4", None, 8, 2), compiled("tp=4", None, 8, 4)
    parts = {port.name: prod(local_shape(port.sharding, program.compiled.axis_sizes)) / prod(port.shape)
             for port in program.compiled.inputs if port.kind == "parameter" and "norm" not in port.name}  # fmt: skip
    assert {name for name, part in parts.items() if part == 1 / 2} == {name for name in parts if "k_proj" in name or "v_proj" in name}
    assert {part for name, part in parts.items() if "k_proj" not in name and "v_proj" not in name} == {1 / 4}
    uses = [(use.phase, use.kind, use.axes, use.bytes_per_rank * use.times) for use in summary.collectives(program.compiled)]
    group = [use for use in uses if use[2] == ("tp_group",)]
    assert {use[:2] for use in group} == {("backward", "all_reduce")}
    assert sum(use[3] for use in group) == 2 * ROWS * SEQ * HEAD * 4
    alike = [(use.phase, use.kind, use.bytes_per_rank * use.times) for use in summary.collectives(other.compiled)]
    assert sorted((phase, kind, size) for phase, kind, axes, size in uses if axes != ("tp_group",)) == sorted(alike)


@pytest.mark.parametrize(
    "mesh, plan", [("tp=4", "tp: kv_heads, ffn"), ("tp=2", None), broad("tp=4", "tp: heads\npin op:*.q_proj: group/tp")]
)
def test_a_plan_may_say_otherwise(mesh: str, plan: str | None) -> None:
    program = compiled(mesh, plan, 8, 2)
    assert str(program.mesh) == mesh and not any("taken apart" in note for note in program.compiled.notes)


def test_lines_of_the_plan_stay() -> None:
    """What says nothing of heads is said of both axes; a pin of what makes keys is left alone."""
    program = compiled("tp=4", "tp: heads, ffn, vocab\npin lm_head.weight: vocab/tp, _\npin op:*.k_proj: -/tp", 8, 2)
    assert str(program.plan).splitlines() == [
        "tp_kv_heads: heads, ffn, vocab", "tp_group: heads, ffn, vocab", "pin lm_head.weight: vocab/tp_kv_heads/tp_group, _",
        "pin op:*.k_proj: -/tp_kv_heads/tp_group", "pin op:model.layers.*.self_attn.v_proj/forward/mm: -/tp_group",
        "pin op:model.layers.*.self_attn.v_proj/backward/mm: -/tp_group",
        "pin op:model.layers.*.self_attn.v_proj/backward/mm.2: head/tp_group",
    ]  # fmt: skip
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


@pytest.mark.broad
def test_stages_and_microbatches() -> None:
    program = compiled("pp=2,tp=4", None, 4, 2, 2, microbatches=2)
    assert str(program.mesh) == "pp=2,tp_kv_heads=2,tp_group=2"
    assert meshc.verify(program, dtype=torch.float64).worst < 1e-10


@pytest.mark.broad
def test_sizes_that_calls_choose() -> None:
    own = model(4, 2)
    step = meshc.TrainStep(own, optimizer=torch.optim.SGD(own.parameters(), lr=0.1))
    rows = {name: {0: Dim("rows", min=2, max=32)} for name in ("input_ids", "labels")}
    ids = torch.randint(48, (ROWS, SEQ))
    options = meshc.Options(dynamic=rows)
    program = meshc.compile(step, meshc.Mesh("tp=4"), kwargs={"input_ids": ids, "labels": ids}, options=options)
    for count in (ROWS, 5):
        assert meshc.verify(program, {"input_ids": ids[:count], "labels": ids[:count]}, dtype=torch.float64).worst < 1e-10
    assert str(program.mesh) == "tp_kv_heads=2,tp_group=2"
