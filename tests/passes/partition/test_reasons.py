"""What a collective says of itself: the value that moves, by the user's names, what reads it, and the plan's lines."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.report.summary import collectives


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.relu(self.up(x))))


def program(plan: str) -> meshc.Program:
    model = nn.Sequential(Block())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=F.mse_loss, clip_grad_norm=1.0)
    inputs = {"input": torch.randn(4, 8), "target": torch.randn(4, 8)}
    return meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=inputs, plan=plan)


def test_a_reduction_names_the_product_its_reader_and_the_plans_line() -> None:
    reasons = [use.reason for use in collectives(program("dp: batch\ntp: ffn").compiled)]
    gradient = "gradient native_layer_norm_backward of 0.norm, for the gradient norm, summed over batch; dp: batch"
    assert reasons == [
        "mm of 0.down, for add, summed over ffn; tp: ffn",
        f"5 reductions together: mean, for the program's output, summed over batch; dp: batch | {gradient}, and 2 more",
        "the gradient norm; tp: ffn",
    ]


def test_a_gather_names_the_parameter() -> None:
    reasons = [use.reason for use in collectives(program("dp: batch; store params, grads, state\ntp: ffn").compiled)]
    (together,) = [reason for reason in reasons if "parameter 0.up.weight, for mm; dp: batch; store params, grads, state" in reason]
    assert together.startswith("4 gathers together: parameter 0.up.weight, ")


def test_no_reason_shows_a_name_of_the_compilers_own() -> None:
    for plan in ("dp: batch\ntp: ffn", "dp: batch; store params, grads, state\ntp: ffn > batch"):
        compiled = program(plan)
        own = {node.name for node in compiled.lowered.placed.graph.nodes if re.search(r"_\d+$|_default", node.name)}
        assert own and not [use.reason for use in collectives(compiled.compiled) if own & set(re.findall(r"\w+", use.reason))]
        assert "in the gradient norm" not in compiled.summary() and "_default" not in compiled.summary().partition("peak at")[0]
