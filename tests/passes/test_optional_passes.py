"""A pass that only saves time or memory may be left out: what the others make then means what the model means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshc
from meshc.passes import pass_runner, pipeline
from tests.one_trace import Kept, one_trace, patches_behind, traces  # noqa: F401
from tests.passes.lower.test_divide_updates import compiled as divided
from tests.passes.trace.test_expert_groups import trained
from tests.zoo.experts import shallow


class Small(nn.Module):
    """A window of attention, a sum from the end, and a feed-forward that is a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixed, self.up, self.down, self.head = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        seen = (places <= places[:, None]) & (places > places[:, None] - 3)
        x = x + F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        x = x + 0.1 * x.flip(1).cumsum(1).flip(1)
        x = x + checkpoint(self.feed, x, use_reentrant=False)
        return self.head(x)

    def feed(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Step:
    """Of the small model, with what the pass has to do."""

    plan: str = "dp: batch\ntp: heads, features"
    microbatches: int = 1

    def compile(self) -> meshc.Program:
        model, generator = Small().double(), torch.Generator().manual_seed(1)
        momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = meshc.TrainStep(model, optimizer=momentum, loss=cross_entropy, microbatches=self.microbatches)
        x = torch.randn(4, 6, 8, generator=generator, dtype=torch.float64)
        inputs = {"x": x, "target": torch.randint(12, (4, 6), generator=generator)}
        return meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=inputs, plan=self.plan, backend="inductor")


@dataclass(frozen=True)
class Experts:
    """A step of Mixtral."""

    def compile(self) -> meshc.Program:
        return trained(shallow("mixtral"), "ep=2")


@dataclass(frozen=True)
class Matrices:
    """A step of Muon."""

    def compile(self) -> meshc.Program:
        return divided(lambda parameters: torch.optim.Muon(parameters, lr=0.1), "dp=2", layers=2)


AXES = Step().plan
OPTIONAL: dict[str, Step | Experts | Matrices] = {
    "inline": Step(),
    "raise": Step("dp: batch"),
    "fold_masks": Step(),
    "fold_scans": Step(),
    "send_rows": Experts(),
    "used_rows": Experts(),
    "offload_params": Step(f"{AXES}\noffload params"),
    "offload_state": Step(f"{AXES}\noffload state"),
    "recompute": Step(f"{AXES}\nremat *: selective"),
    "offload": Step(f"{AXES}\noffload *"),
    "divide_updates": Matrices(),
    "collectives": Step(),
    "exchanges": Experts(),
    "fuse_updates": Step(),
    "fetch": Step(f"{AXES}\noffload params\noffload state"),
    "regions": Step(),
    "start": Step(microbatches=2),
    "memory": Step(),
}
NEEDED = {
    "capture": "the model's graph",
    "autocast": "a program does not know torch's autocast",
    "round_between_stages": "messages between stages in few bits, of plans that ask for them",
    "differentiate": "gradients",
    "between_stages": "likewise: which stage rounds and which one reads",
    "sparsity": "weights that products read some of, of plans that ask for them",
    "precision": "products in few bits, of plans that ask for them",
    "compress": "gradients in fewer bits, of plans that ask for them",
    "update": "new parameters and state",
    "factorize": "which dims are one",
    "split_axes": "axes that a plan has for two factors",
    "annotate": "pins, and refusals of a plan that does not fit",
    "propagate": "where values are sharded",
    "lay_ports": "where ports are sharded",
    "partition": "what a rank computes",
    "grow": "layers that others stand for",
    "chunks": "a head that the plan has in chunks is taken for one from then on",
    "microbatch": "sums over microbatches",
    "stages": "what a rank of a pipeline runs",
    "cut": "a backward of its own for a module",
}


def test_every_pass_is_one_of_them() -> None:
    assert sorted([*OPTIONAL, *NEEDED]) == sorted(pipeline.NAMES)


@cache
def whole_text(step: Step | Experts | Matrices) -> str:
    """With every pass."""
    return str(step.compile())


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_it_a_step_is_the_models_own(name: str, traces: Kept) -> None:  # noqa: F811
    whole = whole_text(OPTIONAL[name])
    run, traces_alike = pass_runner.run_pass, name not in {each.name for each in pipeline.TRACE}

    def leave_out(each: Any, phase: Any, *rest: Any) -> Any:
        return run(replace(each, run=lambda given: given) if each.name == name else each, phase, *rest)

    if not traces_alike:
        traces.clear()
    with mock.patch.object(pass_runner, "run_pass", leave_out):
        left = OPTIONAL[name].compile()
        report = meshc.verify(left, dtype=torch.float64)
    if not traces_alike:
        traces.clear()
    assert str(left) != whole
    assert {"gradient", "parameter after step 0"} <= {kind for kind, _, _ in report.rows}
