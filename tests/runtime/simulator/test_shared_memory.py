"""Memory that values share, played: a text that says what is true gives what it gives without, and one that lies gives other numbers."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch

from meshc.check.consistency import storage_faults as faults
from meshc.ir.mesh import Mesh
from meshc.runtime.simulator.simulate import run_stage
from meshc.text.parse import parse_stage
from tests.passes.lower.test_share_memory import SAID

TEXT = "".join(f"{line}\n" for line in SAID.splitlines() if not any(name in line for name in ("large", "last")))
"""The pass's own sample, without a product that no rank of a test multiplies."""


def run(text: str) -> list[list[torch.Tensor]]:
    inputs = [[torch.arange(16.0).reshape(4, 4) / 16 + rank] for rank in range(2)]
    return run_stage(parse_stage(text), inputs, Mesh("dp=2"), {"dp": 2})


def plain(text: str) -> str:
    return text.replace("; its parts inside, kept", "").replace("; over its operand", "")


def test_what_is_true_changes_no_number() -> None:
    assert [*faults(parse_stage(TEXT))] == []
    for ours, others in zip(run(TEXT), run(plain(TEXT)), strict=True):
        for mine, other in zip(ours, others, strict=True):
            assert torch.equal(mine, other) and not mine.isnan().any()


@pytest.mark.parametrize("old, new, output", [
    ('"output:s": s', '"output:s": sin', 1),  # which s has written over
    ('"output:s": s', '"output:s": mm', 1),  # which lies in flat, over which r is written, and which is gone when the stage is over
    ('"output:total": total', '"output:total": r', 0),  # likewise
    ("aten.sum(r)", "aten.sum(exp)", 0),
])  # fmt: skip
def test_a_lie_shows(old: str, new: str, output: int) -> None:
    text = TEXT.replace(old, new)
    assert [*faults(parse_stage(text))] != []
    for mine, other in zip(run(text), run(plain(text)), strict=True):
        assert not torch.equal(mine[output], other[output])
