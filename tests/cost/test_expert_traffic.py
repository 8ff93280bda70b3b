"""What experts are predicted to be sent where one rank has more than the others: by formulas that a person can check."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

import meshc
from meshc.report import summary
from tests.broad import broad
from tests.formulas.expert_traffic import Traffic, traffic

TOKENS, WIDTH, LAYERS = 16 * 128, 256, 2


def program(mesh: str, **options: Any) -> meshc.Program:
    config = OlmoeConfig(
        vocab_size=65, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_experts=16,
        num_experts_per_tok=2, eos_token_id=1,
    )  # fmt: skip
    model = OlmoeForCausalLM(config)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(65, (16, 128))
    return meshc.compile(step, meshc.Mesh(mesh), kwargs={"input_ids": ids, "labels": ids}, options=meshc.Options(**options))


def test_rows_and_bytes_by_the_formula() -> None:
    """On four ranks rows travel that are read, twice forward and twice backward: of 240 pairs of experts 12 x 11 are all of other ranks.
    The two weights of a token go out with it, and their gradients come back."""
    made = program("ep=4")
    first, second = traffic(made.compiled)
    assert (first.path, second.path) == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert (first.experts, first.chosen, first.ranks, first.tokens) == (16, 2, 4, TOKENS)
    assert [first.rows(times) for times in (1, 2, 4)] == [TOKENS // 2, TOKENS, 2 * TOKENS]
    whole = 3 / 4 * TOKENS * (4 * WIDTH + 2 * 2) * 4
    for times, share in ((1, 1 - 12 * 11 / 240), (2, 1 - 8 * 7 / 240), (4, 1.0)):
        assert first.share(times) == pytest.approx(share)
        assert first.bytes(times) == pytest.approx(whole * share, rel=1e-3)
    sent = [use.bytes_per_rank for use in summary.collectives(made.compiled) if use.kind in ("gather_rows", "scatter_rows")]
    assert len(sent) == 4 * LAYERS and first.bytes(1) + second.bytes(1) == pytest.approx(sum(sent), abs=1)


@pytest.mark.parametrize(
    "mesh, options, rows, bytes",
    [
        broad("dp=2,ep=2", {}, [TOKENS // 2, TOKENS], [4 / 2 * TOKENS / 2 * WIDTH * 4] * 2),  # all tokens travel, whatever is chosen
        broad("ep=2", {"expert_capacity": 1.25}, [TOKENS, 16 * 8 * 20], [4 / 2 * TOKENS * WIDTH * 4] * 2),  # 20 places for each expert
    ],
)
def test_where_all_tokens_travel(mesh: str, options: dict[str, Any], rows: list[int], bytes: list[float]) -> None:
    found = traffic(program(mesh, **options).compiled)[0]
    assert ([found.rows(times) for times in (1, 2)], [found.bytes(times) for times in (1, 2)]) == (rows, bytes)
    assert found.most == 2


@pytest.mark.parametrize("all_of, chosen, ranks, imbalance", [(8, 2, 4, 2), (16, 3, 4, 1), (16, 3, 4, 3), (12, 4, 3, 1.5)])
def test_the_share_is_that_of_choices_that_are_drawn(all_of: int, chosen: int, ranks: int, imbalance: float) -> None:
    draw = random.Random(0)
    mine = range(round(imbalance * all_of / ranks))
    drawn = [draw.sample(range(all_of), chosen) for _ in range(20_000)]
    found = Traffic("", all_of, chosen, ranks, len(drawn), len(drawn) * chosen)
    assert found.share(imbalance) == pytest.approx(sum(any(one in mine for one in row) for row in drawn) / len(drawn), abs=0.01)
    assert found.rows(imbalance) == pytest.approx(sum(sum(one in mine for one in row) for row in drawn), rel=0.02)


