"""Programs of every kind are proved against their traced graphs; what is not covered says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import meshc
from meshc.errors import InputError
from tests import models
from tests.golden.cases import CASES, gpt, infer, train


@pytest.mark.parametrize("name", CASES)
def test_golden_programs_are_proved(name: str) -> None:
    proof = CASES[name]().prove()
    assert proof.holds, str(proof)
    assert proof.kinds["moved"] and proof.trusted and not proof.failures


def test_open_sizes_are_proved_for_those_that_are_asked_for() -> None:
    program = CASES["mlp open sizes"]()
    for batch in (2, 7, 64):
        proof = program.prove({"batch": batch})
        assert proof.holds and f"at batch {batch} (of 2 to 64)" in str(proof), str(proof)
    with pytest.raises(InputError, match="batch is 65"):
        program.prove({"batch": 65})


class Words(nn.Module):
    """A head that may run in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def chunked(count: int) -> meshc.Program:
    model, ids = Words(), torch.zeros(8, 6, dtype=torch.int64)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy)
    return meshc.compile(step, meshc.Mesh("dp=2"), args=(ids,), kwargs={"target": ids}, plan=f"dp: batch\nchunk head: {count}")


def ring(attention: str) -> Callable[[], meshc.Program]:
    def make() -> meshc.Program:
        case = models.nanogpt(batch=2, seq=16, hidden=16, layers=1, heads=4, vocab=13)
        return train(case, "cp=2", "cp: seq", options=meshc.Options(sequence=meshc.SplitSequence(attention=attention)))

    return make


FEATURES: dict[str, Callable[[], meshc.Program]] = {
    "three ranks, uneven": lambda: train(gpt(), "tp=3", clip=1.0),
    "rows uneven": lambda: train(gpt(batch=5), "dp_shard=3", clip=1.0),
    "recomputed": lambda: train(gpt(layers=2), "dp_shard=2,tp=2", options=meshc.Options(remat="layer")),
    "all layers of many": lambda: train(gpt(layers=7), "dp=2,tp=2", clip=1.0),
    "chunks": lambda: chunked(2),
    "chunks, the last shorter": lambda: chunked(3),
    "ring": ring("ring"),
    "zigzag": ring("zigzag"),
    "gathered": ring("gather"),
    "convolutions split by height": lambda: train(models.resnet(), "cp=2", "cp: height"),
    "inference over three axes": lambda: infer(gpt(), "dp=2,cp=2,tp=2"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_proved(name: str) -> None:
    proof = FEATURES[name]().prove()
    assert proof.holds, str(proof)


def test_it_says_what_was_proved_and_what_is_trusted() -> None:
    text = str(CASES["gpt dp tp"]().prove())
    assert text.startswith("proved: 324 lines of a rank on dp=2,tp=2 are the traced graph's")
    assert "trusted: " in text and "aten.mm" in text


def test_a_program_from_disk_is_proved(tmp_path: Path) -> None:
    def make() -> meshc.Program:
        return train(gpt(), "dp=2", options=meshc.Options(cache=str(tmp_path)))

    assert make().prove().holds
    again = make()
    assert "taken from disk" in again.timings and again.prove().holds


def test_numbers_are_not_computed() -> None:
    """Parameters without values do."""
    with torch.device("meta"):
        case = gpt()
    assert train(case, "dp=2").prove().holds
