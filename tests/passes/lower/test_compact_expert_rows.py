"""Routed experts on the rows that are used: text in, text out; what stays as it is; and that it equals one device."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import meshc
from meshc.check.consistency import check_program
from meshc.ir.regions import region_of
from meshc.ir.used_rows_dims import dim_of, of_used_rows
from meshc.passes.lower.compact_expert_rows import compact_graph
from meshc.program.program import PlainProgram
from meshc.runtime.simulator import reference_comparison as verification
from meshc.runtime.simulator.simulation import simulate
from meshc.text.parse import parse_stage
from meshc.text.printer import print_stage
from tests.broad import broad
from tests.passes.trace.test_expert_groups import case, program, trained
from tests.zoo.experts import shallow

HEAD = '''@ranks("ep=2")
def main(
    choice: "i64[4, 2]" = "input:choice",
    x: "f32[4, 6]" = "input:x",
    w1: "f32[3, 6, 8]" = "parameter:w1",
    w2: "f32[3, 4, 6]" = "parameter:w2",
    weights: "f32[4, 2]" = "input:weights",
    g: "f32[4, 6]" = "input:g",
):
    both: "(i64[1, 4, 2], i64[1, 4, 2])" = meshc.group_choices(choice, 1, 3, 2, 0)
    own: "i64[1, 4, 2]" = getitem(both, 0)
    slot: "i64[1, 4, 2]" = getitem(both, 1)
    flat: "i64[1, 8]" = aten.reshape(own, [1, 8])
    handed: "f32[1, 4, 2, 6]" = meshc.to_groups(x, own)
    rows: "f32[1, 8, 6]" = aten.reshape(handed, [1, 8, 6])
    h: "f32[1, 8, 8]" = meshc.group_mm(rows, w1, flat, 3, 0.5)
'''
ACTIVATION = '''    a: "f32[1, 8, 4]" = aten.slice.Tensor(h, -1, 0, 4)
    p: "f32[1, 4, 2]" = meshc.weights_of_groups(weights, own, slot)
    q: "f32[1, 8, 1]" = aten.reshape(p, [1, 8, 1])
    b: "f32[1, 8, 4]" = aten.mul.Tensor(a, q)
'''
TAIL = '''    y: "f32[1, 8, 6]" = meshc.group_mm(b, w2, flat, 3, 0.5)
    made: "f32[1, 4, 2, 6]" = aten.reshape(y, [1, 4, 2, 6])
    out: "f32[4, 6]" = meshc.from_groups(made, own)
'''
BACKWARD = '''    handed_1: "f32[1, 4, 2, 6]" = meshc.to_groups(g, own)
    grad: "f32[1, 8, 6]" = aten.reshape(handed_1, [1, 8, 6])
    of_w2: "f32[3, 4, 6]" = meshc.group_outer(b, grad, flat, 3, 3, 0.5)
    turned: "f32[3, 6, 4]" = aten.transpose.int(of_w2, -2, -1)
    t: "f32[3, 6, 4]" = aten.transpose.int(w2, 1, 2)
    of_b: "f32[1, 8, 4]" = meshc.group_mm(grad, t, flat, 3, 0.5)
    s: "f32[1, 8, 4]" = aten.mul.Tensor(of_b, a)
    of_q: "f32[1, 8, 1]" = aten.sum.dim_IntList(s, [2], True)
    of_p: "f32[1, 4, 2]" = aten.reshape(of_q, [1, 4, 2])
    of_weights: "f32[4, 2]" = meshc.weights_to_tokens(of_p, own, slot, 2)
'''
GIVEN = '''    return {
        "output:out": out,
    }
'''
GIVEN_BOTH = '''    return {
        "output:out": out,
        "output:turned": turned,
        "output:of_weights": of_weights,
    }
'''


def after(text: str) -> str:
    stage = parse_stage(text)
    compact_graph(stage.graph)
    return print_stage(stage)


def test_rows_are_gathered_once_and_put_back_once_forward_and_backward() -> None:
    found = after(HEAD + ACTIVATION + TAIL + BACKWARD + GIVEN_BOTH)
    assert_expected_inline(found.partition("):\n")[2], """\
    both: "(i64[1, 4, 2], i64[1, 4, 2])" = meshc.group_choices(choice, 1, 3, 2, 0)
    own: "i64[1, 4, 2]" = getitem(both, 0)
    used_rows_default: "(i64[1, 8] used(1), i64[3])" = meshc.used_rows(own, 3)
    getitem_1: "i64[1, 8] used(1)" = getitem(used_rows_default, 0)
    getitem: "i64[3]" = getitem(used_rows_default, 1)
    slot: "i64[1, 4, 2]" = getitem(both, 1)
    rows_of_tokens_default: "f32[1, 8, 6] used(1)" = meshc.rows_of_tokens(x, getitem_1, 2)
    used_mm_default: "f32[1, 8, 8] used(1)" = meshc.used_mm(rows_of_tokens_default, w1, getitem, 0.5)
    slice_tensor: "f32[1, 8, 4] used(1)" = aten.slice.Tensor(used_mm_default, -1, 0, 4)
    p: "f32[1, 4, 2]" = meshc.weights_of_groups(weights, own, slot)
    q: "f32[1, 8, 1]" = aten.reshape(p, [1, 8, 1])
    rows_of_places_default: "f32[1, 8, 1] used(1)" = meshc.rows_of_places(q, getitem_1)
    mul_tensor: "f32[1, 8, 4] used(1)" = aten.mul.Tensor(slice_tensor, rows_of_places_default)
    used_mm_default_1: "f32[1, 8, 6] used(1)" = meshc.used_mm(mul_tensor, w2, getitem, 0.5)
    tokens_of_rows_default: "f32[4, 6]" = meshc.tokens_of_rows(used_mm_default_1, getitem_1, 4, 2)
    rows_of_tokens_default_1: "f32[1, 8, 6] used(1)" = meshc.rows_of_tokens(g, getitem_1, 2)
    used_outer_default: "f32[3, 6, 4]" = meshc.used_outer(rows_of_tokens_default_1, mul_tensor, getitem, 0.5)
    t: "f32[3, 6, 4]" = aten.transpose.int(w2, 1, 2)
    used_mm_default_2: "f32[1, 8, 4] used(1)" = meshc.used_mm(rows_of_tokens_default_1, t, getitem, 0.5)
    mul_tensor_1: "f32[1, 8, 4] used(1)" = aten.mul.Tensor(used_mm_default_2, slice_tensor)
    sum_dim_int_list: "f32[1, 8, 1] used(1)" = aten.sum.dim_IntList(mul_tensor_1, [2], True)
    reshape_default: "f32[1, 8] used(1)" = aten.reshape(sum_dim_int_list, [1, -1])
    places_of_rows_default: "f32[1, 8]" = meshc.places_of_rows(reshape_default, getitem_1, 8)
    reshape_default_1: "f32[1, 4, 2]" = aten.reshape(places_of_rows_default, [1, 4, 2])
    of_weights: "f32[4, 2]" = meshc.weights_to_tokens(reshape_default_1, own, slot, 2)
    return {
        "output:out": tokens_of_rows_default,
        "output:turned": used_outer_default,
        "output:of_weights": of_weights,
    }
""")


@pytest.mark.parametrize(
    "between",
    [
        '    b: "f32[1, 8, 4]" = aten.cumsum(a, 1)\n',
        '    m: "f32[1, 1, 4]" = aten.mean.dim(a, [1], True)\n    b: "f32[1, 8, 4]" = aten.sub.Tensor(a, m)\n',
        '    z: "f32[1, 4, 8]" = aten.reshape(a, [1, 4, 8])\n    b: "f32[1, 8, 4]" = aten.reshape(z, [1, 8, 4])\n',
        '    b: "f32[1, 8, 4]" = all_reduce(a, ["ep"], "sum")\n',
        '    b: "f32[1, 8, 4]" = aten.flip(a, [1])\n',
    ],
)
def test_where_rows_know_of_each_other_all_stays_as_it_is(between: str) -> None:
    text = HEAD + ACTIVATION.splitlines(keepends=True)[0] + between + TAIL + GIVEN
    text = print_stage(parse_stage(text))
    assert after(text) == text


def test_where_rows_leave_all_stays_as_it_is() -> None:
    text = print_stage(parse_stage(HEAD + ACTIVATION + TAIL + GIVEN.replace("out,", 'out,\n        "output:a": a,')))
    assert after(text) == text


def operators(found: PlainProgram) -> set[str]:
    return {str(node.target) for stage in found.stages.values() for node in stage.graph.nodes if node.op == "call_function"}


PADDED = {"meshc.to_groups.default", "meshc.in_slots.default", "meshc.group_mm.default", "meshc.group_outer.default"}


@pytest.mark.parametrize("family, mesh", [broad("mixtral", "ep=2,tp=2"), broad("gpt_oss", "dp=2,ep=2"), broad("switch_transformers", "ep=4")])
def test_a_step_has_no_row_without_a_choice(family: str, mesh: str) -> None:
    found = program(family, mesh)
    assert "meshc.used_rows.default" in operators(found) and operators(found).isdisjoint(PADDED)
    check_program(found, "program")


@pytest.mark.broad
def test_used_rows_are_in_no_region_that_is_compiled() -> None:
    found = shallow("mixtral")
    step = meshc.TrainStep(found.model, optimizer=torch.optim.SGD(found.model.parameters(), lr=0.1), loss=lambda output: output.loss)
    compiled = meshc.compile(step, meshc.Mesh("ep=2"), backend="inductor", kwargs=found.call_kwargs).compiled
    assert isinstance(compiled, PlainProgram)
    assert "meshc.used_rows.default" in operators(compiled) and operators(compiled).isdisjoint(PADDED)
    inside = [node for stage in compiled.stages.values() for node in stage.graph.nodes if region_of(node) is not None]
    assert inside and not any(map(of_used_rows, inside))


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("ep=2", {"remat": "layer"}),
        broad("ep=2", {"remat": "selective"}),
        broad("ep=2", {"remat": "cheap"}),
        broad("pp=2,ep=2", {"schedule": "1f1b"}),
        broad("pp=2,ep=2", {"schedule": "zb_h1", "remat": "layer"}),
    ],
)
def test_what_is_recomputed_or_kept_for_a_later_stage_equals_one_device(mesh: str, options: dict[str, Any]) -> None:
    found = trained(case("mixtral") if "pp" in mesh else shallow("mixtral"), mesh, **options)
    assert isinstance(found.compiled, PlainProgram) and "meshc.used_mm.default" in operators(found.compiled)
    assert meshc.verify(found, dtype=torch.float64).ok


@pytest.mark.broad
def test_no_stage_begins_within_a_layers_experts() -> None:
    with pytest.raises(meshc.PlanError, match="begins within the experts of model.layers.0.mlp.experts"):
        trained(case("mixtral"), "pp=2,ep=2", pp_splits=["model.layers.0.mlp.experts.act_fn"])


@pytest.mark.usefixtures("patches_behind")
def test_what_is_wrong_with_used_rows_is_named_where_they_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """In part a value is compared with nothing: its rows lie otherwise than on one device."""

    def wrong(compiled: Any, values: Any, **how: Any) -> dict[str, torch.Tensor]:
        for stage in compiled.stages.values():
            for node in stage.graph.nodes:
                if node.target is torch.ops.aten.silu.default and dim_of(node) is not None:
                    node.target = torch.ops.aten.tanh.default
        return simulate(compiled, values, **how)

    monkeypatch.setattr(verification, "simulate", wrong)
    with pytest.raises(meshc.VerifyError, match="the first wrong value is (all_reduce|reduce_scatter|tokens_of_rows|reshape|add)"):
        meshc.verify(trained(shallow("mixtral"), "ep=2"))
