"""A model of two products on a mesh, as far as the planner needs it: placed, without memory behind its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshc.frontend import call_keys
from meshc.frontend.train_step import TrainStep, traced_step
from meshc.ir import op_name
from meshc.ir.mesh import Mesh
from meshc.optimizer.optimizer import describe
from meshc.options import Options
from meshc.passes import pipeline
from meshc.passes.driver import compile_program
from meshc.passes.pass_runner import run_pass
from meshc.passes.phases.choices import AxisChoices
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.phases.request import Request


class Two(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().sum()


@cache
def two(rows: int, hidden: int, ffn: int, mesh: str, plan: str) -> PlacedModel:
    """A step over them with AdamW in bfloat16, up to where the planner stands."""
    with torch.device("meta"):
        model = Two(hidden, ffn).to(torch.bfloat16)
        x = torch.empty(rows, hidden, dtype=torch.bfloat16)
    return step(model, {"x": x}, mesh, plan, lambda out: out)


def step(
    model: nn.Module, kwargs: dict[str, Tensor], mesh: str, plan: str, loss: Callable[..., Tensor], **asked: Any
) -> PlacedModel:
    """A step of a model with AdamW, all of its layers captured, up to where the planner stands; `asked`: further fields of the request."""
    optimizer = torch.optim.AdamW(model.parameters())
    traced = traced_step(TrainStep(model, optimizer=optimizer, loss=loss))
    args, kwargs = call_keys.canonical_call(traced, (), kwargs)
    request = Request(
        module=model, function=traced.function, signature=traced.signature, args=args, kwargs=kwargs, mesh=Mesh(mesh), plan=plan,
        grad=True, train=True, optimizer=describe(optimizer), options=Options().having(depth="whole"), **asked,
    )  # fmt: skip
    return run_pass(pipeline.PLACE[0], compile_program.update_and_factorize(compile_program.trace(request)))


def products(placed: PlacedModel, choices: AxisChoices) -> list[dict[str, str]]:
    """What each axis splits of each matrix product, in graph order."""
    found = []
    for node in placed.graph.nodes:
        if node.op == "call_function" and op_name(node) == "aten.mm":
            instance = placed.factors.instances[node]
            found.append({axis: placed.names.of[instance.factor[t]] for t, axes in choices.tokens[node].items() for axis in axes})
    return found
