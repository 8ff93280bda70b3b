"""What two programs differ in: of equal programs nothing, of others what their plans, storage, collectives, memory and times say."""

from __future__ import annotations

import json
from functools import cache

import torch

import meshc
from meshc.report.figures import Figures, figures
from meshc.report.program_diff import differences, text
from tests.models import mlp


@cache
def compiled(plan: str) -> Figures:
    case = mlp()
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss)
    return figures(meshc.compile(step, meshc.Mesh("dp=2"), kwargs=case.call_kwargs, plan=plan).compiled, "h100")


FSDP = "dp: batch; store params, grads, state\nstore norm.*: hidden!"
BYTES = {"norm": 4 * 24, "up.weight": 4 * 40 * 24, "middle.weight": 4 * 40 * 40, "down.weight": 4 * 10 * 40}


def test_a_program_and_itself() -> None:
    found = differences(compiled("ddp"), compiled("ddp"))
    assert not any(found.values())
    assert text(found, ("a", "b")) == "- a\n+ b\n\nnothing differs"


def test_figures_are_those_of_the_program() -> None:
    found = compiled(FSDP)
    assert json.loads(json.dumps(found)) == found
    assert (found["ranks"], found["device"], found["plan"]) == (2, "h100", FSDP.splitlines())
    assert found["storage"]["up.weight"] == dict.fromkeys(("params", "grads", "state"), "[ffn 40/dp, hidden 24]")
    assert found["storage"]["norm.weight"] == dict.fromkeys(("params", "grads", "state"), "[hidden 24]")
    (gathered,) = [row for row in found["collectives"] if row["phase"] == "forward" and row["collective"] == "all_gather"]
    assert gathered["bytes_per_rank"] == sum(BYTES.values()) - BYTES["norm"] + 4 * (40 + 40 + 10) and gathered["axes"] == ["dp"]
    assert found["memory_bytes"]["parameters"] == gathered["bytes_per_rank"] // 2 + 2 * BYTES["norm"]


def test_what_differs() -> None:
    found = differences(compiled("ddp"), compiled(FSDP))
    assert found["removed"] == ["dp: batch"] and found["added"] == FSDP.splitlines()
    (up,) = [row for row in found["storage"] if row["parameter"] == "up.weight"]
    assert up == {
        "parameter": "up.weight", "count": 1, "kinds": ["params", "grads", "state"],
        "one": "[ffn 40, hidden 24]", "other": "[ffn 40/dp, hidden 24]",
    }  # fmt: skip
    assert not [row for row in found["storage"] if row["parameter"].startswith("norm")]
    (scattered,) = [row for row in found["collectives"] if row["collective"] == "reduce_scatter"]
    assert (scattered["one_count"], scattered["one_bytes_per_rank"], scattered["axes"]) == (0, 0, ["dp"])
    before, after = found["memory_bytes"]["optimizer state"]
    assert before > 1.9 * after
    table = text(found, ("ddp", FSDP))
    assert table.startswith("- ddp\n+ dp: batch; store params, grads, state\n\nplan\n  - dp: batch\n  + dp: batch; store params")
    assert "optimizer state" in table and "%" in table and "predicted time of a call" in table
