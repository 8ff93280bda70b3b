"""`heads*seq` takes an axis apart: as many ranks for heads as divide both, the rest for the second factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshc
from meshc.errors import PlanError
from meshc.frontend.capture import torch_graph
from meshc.passes.trace import capture_model
from meshc.plan.plan import Plan
from meshc.report import summary
from tests.broad import broad
from tests.meaning.test_rings import Attends
from tests.one_trace import one_trace, patches_behind, traces  # noqa: F401

BOTH = "cp: heads*seq@attention > seq"


def kinds(program: meshc.Program) -> set[tuple[str, tuple[str, ...]]]:
    return {(use.kind, tuple(use.axes)) for use in summary.collectives(program.compiled)}


def compiled(mesh: str, heads: int = 2, plan: str = BOTH, **how: Any) -> meshc.Program:
    options = meshc.Options(sequence=meshc.SplitSequence(attention="ring"))
    model = Attends(16, heads, is_causal=True)
    return meshc.compile(model, meshc.Mesh(mesh), kwargs={"x": torch.randn(2, 13, 16)}, plan=plan, options=options, **how)


def test_the_line_is_read_and_printed() -> None:
    plan = Plan(f"{BOTH}; store params")
    (term, _) = plan.axes[0].terms
    assert (term.factor, term.rest, term.region) == ("heads", "seq", "attention")
    assert str(plan) == f"{BOTH}; store params" and Plan(str(plan)) == plan
    with pytest.raises(PlanError, match="a second factor follows"):
        Plan("cp: heads*@attention")
    with pytest.raises(PlanError, match="heads and heads are one factor"):
        Plan("cp: heads*heads")


@pytest.mark.parametrize("ranks, heads, mesh", [
    (4, 2, "cp_seq=2,cp_heads=2"), (6, 4, "cp_seq=3,cp_heads=2"), (2, 4, "cp=2"), (3, 4, "cp=3"), (8, 4, "cp_seq=2,cp_heads=4"),
])  # fmt: skip
def test_heads_go_as_far_as_they_divide(ranks: int, heads: int, mesh: str) -> None:
    """Of two ranks all have heads of their own; of three none, and it is a ring."""
    program = compiled(f"cp={ranks}", heads)
    assert str(program.compiled.mesh) == mesh
    ways = {kind for kind, _ in kinds(program)} & {"all_to_all", "ring_shift"}
    assert ways == {"cp=2": {"all_to_all"}, "cp=3": {"ring_shift"}}.get(mesh, {"all_to_all", "ring_shift"})
    said = str(program.compiled.plan)
    assert ("cp_seq: seq@attention > seq\ncp_heads: heads@attention > seq" in said) == ("cp_seq" in mesh)


@pytest.mark.parametrize("mesh, options", [
    ("cp=4", meshc.Options(sequence=meshc.SplitSequence(attention="ring"))),
    broad("cp=4", meshc.Options(sequence=meshc.SplitSequence(attention="zigzag"))),
    broad("dp=2,cp=4", meshc.Options(sequence=meshc.SplitSequence(attention="ring"))),
])  # fmt: skip
def test_a_training_step_is_the_models_own(mesh: str, options: meshc.Options) -> None:
    """13 positions over four ranks, of two heads: twice as many ranks as heads."""
    plan = BOTH if mesh == "cp=4" else f"dp: batch\n{BOTH}"
    model = Attends(16, 2, is_causal=True)
    step = meshc.TrainStep(model.double(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y: y.square().mean())
    program = meshc.compile(step, meshc.Mesh(mesh), kwargs={"x": torch.randn(4, 13, 16).double()}, plan=plan, options=options)
    assert {("all_to_all", ("cp_heads",)), ("ring_shift", ("cp_seq",))} <= kinds(program)
    report = meshc.verify(program, dtype=torch.float64)
    assert report.worst < 1e-10 and {"gradient", "parameter after step 2"} <= {kind for kind, _, _ in report.rows}


def test_what_cannot_be_taken_apart_says_why() -> None:
    for plan, mesh, text in (
        ("cp: tails*seq@attention > seq", "cp=4", "the model has no factor 'tails'; it has .*heads.*seq"),
        ("cp: heads*sek@attention > seq", "cp=4", "line 1, .*the model has no factor 'sek'"),
        ("dp: heads*seq", "dp=4", "dp splits the batch by its name"),
        ("pp: heads*seq", "pp=2", "pp has stages by its name"),
        (f"{BOTH}\ncp_seq: batch", "cp=4,cp_seq=2", "makes an axis cp_seq, which the mesh .* has already"),
        ("cp: heads*seq > ffn*seq", "cp=4", "both take cp apart; keep one of them"),
        (f"{BOTH}\npin qkv.weight: _, features/cp_seq", "cp=4", "the mesh has no axis cp_seq"),
    ):
        with pytest.raises(PlanError, match=text):
            compiled(mesh, plan=plan)


def test_lines_about_the_axis_are_of_both_parts() -> None:
    program = compiled("cp=4", plan=f"{BOTH}\nstore qkv.weight: _, features/cp")
    assert "store qkv.weight: _, features/cp_seq/cp_heads" in str(program.compiled.plan)


def test_nothing_is_traced_to_count_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    monkeypatch.setattr(capture_model, "torch_graph", lambda *args, **how: graphs.append(args) or torch_graph(*args, **how))
    compiled("cp=4")
    assert len(graphs) == 1
