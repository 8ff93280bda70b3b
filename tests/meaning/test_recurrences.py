"""A recurrence along a split sequence means what it means on one device, and sends what the formula says."""

from __future__ import annotations

from functools import cache

import pytest

from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.zoo.experts import FAMILIES
from tests.zoo.run import adamw, case

BATCH, TOKENS, CHANNELS, STATE, LAYERS = 4, 12, 64, 8, 2
"""Of the small Mamba. Five ranks have 3, 3, 3, 3 and no positions, eight two or none."""


@cache
def captured(kind: str) -> Captured:
    found = FAMILIES[kind].case(kind) if kind in FAMILIES else case(kind)
    return Captured(found, train=True, double=True)


CASES = [
    ("mamba", "cp=2", "cp: seq"),
    ("mamba", "cp=5", "cp: seq"),
    broad("mamba", "cp=3", "cp: seq"),
    broad("mamba", "cp=8", "cp: seq"),
    broad("mamba", "dp=2,cp=2", "dp: batch\ncp: seq"),
    ("mamba", "cp=2,tp=2", "cp: seq\ntp: ffn"),
    broad("mamba", "tp=2", "tp: ffn"),
    broad("mamba", "tp=3,dp=2", "dp: batch\ntp: ffn"),
    broad("jamba", "cp=2", "cp: seq"),
    broad("jamba", "cp=3", "cp: seq"),
    broad("jamba", "dp=2,tp=2", "dp: batch\ntp: heads, ffn"),
]


@pytest.mark.parametrize("kind, mesh, plan", CASES)
def test_a_training_step_is_the_models_own(kind: str, mesh: str, plan: str) -> None:
    """Loss, every gradient, and parameters after two steps."""
    source = captured(kind)
    source.verify_training(mesh, plan, adamw)
    targets = [str(node.target) for node in source.latest.stages["main"].graph.nodes]
    assert "meshc.recurrence.default" in targets
    assert ("meshc.recurrence_end.default" in targets) == ("cp" in mesh)


@pytest.mark.parametrize("mesh", ["pp=2,cp=2"])
def test_stages_of_a_pipeline(mesh: str) -> None:
    captured("mamba").verify_training(mesh, "cp: seq", adamw, microbatches=2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_sent_for_a_recurrence(ranks: int) -> None:
    """Forward the product and the end of each stretch, backward those of the gradient, and which h is the last: a position of t of each."""
    source = captured("mamba")
    source.verify_training(f"cp={ranks}", "cp: seq", adamw)
    gathers = [use for use in summary.collectives(source.latest) if use.kind == "all_gather" and "recurrence" in use.reason]
    position = BATCH * CHANNELS * STATE * 8
    assert sum(use.bytes_per_rank for use in gathers) == LAYERS * (2 + 4) * position * ranks
