"""Programs of every kind are proved against their traced graphs; what is not covered says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshc
from meshc.proof import program_proof
from tests.golden.cases import CASES, gpt, train
from tests.proof.programs import FEATURES


@pytest.mark.parametrize("name", CASES)
def test_golden_programs_are_proved(name: str) -> None:
    proof = CASES[name]().prove()
    assert proof.holds, str(proof)
    assert proof.kinds["moved"] and proof.trusted and not proof.failures


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


def test_the_prover_can_be_read() -> None:
    """A core of at most a thousand lines, and a file of at most 150 for each thing that it asks."""
    room = Path(program_proof.__file__).parent
    lines = {path.stem: len(path.read_text().splitlines()) for path in room.glob("*.py")}
    core = ("tiles", "terms", "held", "evaluate", "erasure")
    assert sum(lines.pop(name) for name in core) <= 1000
    assert {name: count for name, count in lines.items() if count > 150} == {}
