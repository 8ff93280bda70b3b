"""Memory that values share, played: a text that says what is true gives what it gives without, and one that lies gives other numbers."""

# ruff: noqa: E501 - lines of programs are as long as they are
from __future__ import annotations

import pytest
import torch

from meshc.check.shared import faults
from meshc.ir.mesh import Mesh
from meshc.runtime.simulator.simulate import run_stage
from meshc.text.parse import parse_stage

TEXT = """def main(
    x: "f32[2, 2]" = "input:x",
):
    sin: "f32[2, 2]" = aten.sin(x)
    exp: "f32[2, 2]" = aten.exp(x)
    a: "f32[4]" = aten.reshape(sin, [-1])
    b: "f32[4]" = aten.reshape(exp, [-1])
    flat: "f32[8]; its parts inside, kept" = aten.cat([a, b])
    r: "f32[8]; over its operand" = all_reduce(flat, ["dp"], "sum")
    total: "f32[]" = aten.sum(r)
    cos: "f32[2, 2]" = aten.cos(x)
    s: "f32[2, 2]; over its operand" = all_reduce(cos, ["dp"], "sum")
    return {
        "output:total": total,
        "output:s": s,
    }
"""


def run(text: str) -> list[list[torch.Tensor]]:
    inputs = [[torch.arange(4.0).reshape(2, 2) + rank] for rank in range(2)]
    return run_stage(parse_stage(text), inputs, Mesh("dp=2"), {"dp": 2})


def plain(text: str) -> str:
    return text.replace("; its parts inside, kept", "").replace("; over its operand", "")


def test_what_is_true_changes_no_number() -> None:
    assert [*faults(parse_stage(TEXT))] == []
    for ours, others in zip(run(TEXT), run(plain(TEXT)), strict=True):
        for mine, other in zip(ours, others, strict=True):
            assert torch.equal(mine, other) and not mine.isnan().any()


@pytest.mark.parametrize("old, new, output", [
    ('"output:s": s', '"output:s": cos', 1),  # which s has written over
    ('"output:s": s', '"output:s": sin', 1),  # which lies in flat, over which r is written, and which is gone when the stage is over
    ('"output:total": total', '"output:total": r', 0),  # likewise
    ("aten.sum(r)", "aten.sum(exp)", 0),
])  # fmt: skip
def test_a_lie_shows(old: str, new: str, output: int) -> None:
    text = TEXT.replace(old, new)
    assert [*faults(parse_stage(text))] != []
    for mine, other in zip(run(text), run(plain(text)), strict=True):
        assert not torch.equal(mine[output], other[output])
