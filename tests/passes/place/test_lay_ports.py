"""Shardings of ports: text in, text out; nothing to split; local inputs, whose outputs, tangents and gradients are parts of the batch."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import meshc
from tests.models import MLP
from tests.passes.stepped import around, changed

X = {"x": torch.zeros(4, 8)}


def test_parameters_are_stored_as_their_first_use_wants_them_and_inputs_come_whole() -> None:
    with torch.no_grad():
        before, after = around("lay_ports", MLP(8, 12, 6), "dp=2,tp=2", "dp: batch\ntp: ffn", **X)
    assert_expected_inline(changed(before, after), """\
- up_weight: "f32[ffn 12, hidden 8]" = "parameter:up.weight",
- up_bias: "f32[ffn 12]" = "parameter:up.bias",
- middle_weight: "f32[ffn 12, ffn 12]" = "parameter:middle.weight",
+ up_weight: "f32[ffn 12/tp, hidden 8]" = "parameter:up.weight",
+ up_bias: "f32[ffn 12/tp]" = "parameter:up.bias",
+ middle_weight: "f32[ffn 12, ffn 12/tp]" = "parameter:middle.weight",
- down_weight: "f32[down.weight.0 6, ffn 12]" = "parameter:down.weight",
+ down_weight: "f32[down.weight.0 6, ffn 12/tp]" = "parameter:down.weight",
""")


def test_state_is_stored_as_its_parameter_and_a_count_whole() -> None:
    model = nn.Linear(8, 6, bias=False)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=lambda y: y.square().mean())
    assert_expected_inline(changed(*around("lay_ports", step, "dp_shard=2", input=torch.zeros(4, 8))), """\
- weight: "f32[weight.0 6, weight.1 8]" = "parameter:weight",
+ weight: "f32[weight.0 6/dp_shard, weight.1 8]" = "parameter:weight",
- weight_exp_avg: "f32[weight.0 6, weight.1 8]" = "state:weight/exp_avg",
- weight_exp_avg_sq: "f32[weight.0 6, weight.1 8]" = "state:weight/exp_avg_sq",
+ weight_exp_avg: "f32[weight.0 6/dp_shard, weight.1 8]" = "state:weight/exp_avg",
+ weight_exp_avg_sq: "f32[weight.0 6/dp_shard, weight.1 8]" = "state:weight/exp_avg_sq",
""")


def test_without_axes_to_split_nothing_changes() -> None:
    with torch.no_grad():
        assert changed(*around("lay_ports", MLP(8, 12, 6), "dp=2", "dp: -", **X)) == ""


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def shardings(inputs: str) -> list[str]:
    program = meshc.compile(
        Doubled(), meshc.Mesh("dp=2"), kwargs={"x": torch.zeros(4, 3, requires_grad=True)}, inputs=inputs
    )
    return [f"{port.kind} {port.name}: {port.sharding}" for port in (*program.compiled.inputs, *program.compiled.outputs)]


def test_local_inputs_come_as_rows_and_so_do_outputs_tangents_and_gradients() -> None:
    assert_expected_inline("\n".join(shardings("global")), """\
input x: [batch 4, f0 3]
tangent output: [batch 4, f0 3]
output output: [batch 4, f0 3]
gradient input:x: [batch 4, f0 3]""")
    assert_expected_inline("\n".join(shardings("local")), """\
input x: [batch 8/dp, f0 3]
tangent output: [batch 8/dp, f0 3]
output output: [batch 8/dp, f0 3]
gradient input:x: [batch 8/dp, f0 3]""")
