"""State that is kept in fewer bits is widened for a few updates at a time, and written where it is kept."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshc
from meshc.passes.lower import low_precision_state


def lines(backend: str = "eager", width: int = 4, mesh: str = "dp_shard=2", plan: str | None = None, **keep: object) -> list[str]:
    """The program of a step of two layers, a name for each line of what keeps state; "region" where one begins."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)).to(torch.bfloat16)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=F.mse_loss)
    x = torch.zeros(4, width, dtype=torch.bfloat16)
    options = meshc.Options(**{"optimizer_state": "bf16", **keep})  # type: ignore[arg-type]
    program = meshc.compile(step, meshc.Mesh(mesh), plan=plan, args=(x,), kwargs={"target": x}, backend=backend, options=options)
    written = "adam_many_|round_state_|round_param_|join_master_|decode_state|block_scale|encode_state_"
    pattern = rf"with (region)|aten\.(_to_copy)\(\w+, dtype=f32|meshc\.({written})\(|(all_reduce)\(block_scale"
    return [next(filter(None, found.groups())) for found in re.finditer(pattern, str(program))]


WIDENED = ["join_master_", "_to_copy", "_to_copy", "_to_copy"]  # a parameter, its gradient, two moments
KEPT = ["round_state_", "round_state_", "round_param_"]


def updating(found: list[str]) -> list[str]:
    """From the first line of the update on; before it loss and gradient norm make copies too."""
    return found[found.index("join_master_") :]


def test_all_at_a_time_where_it_is_little() -> None:
    assert updating(lines(master_weights=True)) == WIDENED * 2 + ["adam_many_"] + KEPT * 2


def test_a_part_at_a_time_where_it_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_state, "WIDENED_BYTES", 4 * 4 * 8)  # of a rank's half of 4 x 4, in float32
    assert updating(lines(master_weights=True)) == [*WIDENED, "adam_many_", *KEPT] * 2


def test_regions_do_not_widen_sooner() -> None:
    found = [line for line in updating(lines("inductor", master_weights=True)) if line != "region"]
    assert found == ["join_master_"] * 2 + ["_to_copy"] * 6 + ["adam_many_"] + KEPT * 2


def test_codes_are_decoded_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision_state, "WIDENED_BYTES", 4)
    found = lines(width=512, mesh="tp=2", plan="tp: ffn", optimizer_state="8bit")
    coded = found[found.index("decode_state") :]
    first = ["block_scale", "encode_state_"] * 2  # its rows are whole on a rank
    second = ["block_scale", "all_reduce", "encode_state_"] * 2  # blocks whose halves lie on two ranks
    decoded = ["decode_state", "decode_state", "adam_many_"]
    assert coded == [*decoded, *first, "round_param_", "_to_copy", "_to_copy", *decoded, *second, "round_param_"]


def test_codes_in_regions() -> None:
    found = lines("inductor", width=512, mesh="tp=2", plan="tp: ffn", optimizer_state="8bit")
    order = [name for name in found if name in ("decode_state", "adam_many_", "encode_state_")]
    assert order == ["decode_state"] * 4 + ["adam_many_"] + ["encode_state_"] * 4
