"""A search over the layers that stand for all finds what a search over all of them finds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import device
from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.optimizer.optimizer import describe
from meshc.passes import pipeline
from meshc.passes.depth.captured_names import captured_name, captured_patterns
from meshc.passes.depth.multiplicity import whole_names
from meshc.passes.driver import compile_program as driver
from meshc.passes.pass_runner import run_pass
from meshc.passes.phases.captured_depth import Depth, Stretch
from meshc.passes.planner.plan_search import PlanSearch
from tests import models
from tests.broad import broad
from tests.captured import Captured
from tests.passes.depth.stacks import WORDS, Stack, cross_entropy
from tests.passes.depth.texts import text_of
from tests.zoo.stock import STOCK

OPEN = "dp: auto\ntp: auto"


def compiled(depth: str, layers: int = 6, mesh: str = "dp=2", plan: str = "dp: auto", budget: int | None = None) -> meshc.Program:
    model = Stack([16] * layers, dropout=0.1)
    step = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy, clip_grad_norm=1.0)
    ids = torch.zeros(WORDS + 1, 4, dtype=torch.int64)
    options = meshc.Options(debugging=meshc.Debugging(depth=depth), memory_budget=budget)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs={"ids": ids, "target": ids}, plan=plan, options=options)


def same(whole: meshc.Program, part: meshc.Program) -> None:
    assert whole.lowered.depth is None and part.lowered.depth is not None
    notes = [[note.partition(" over ")[0] for note in program.compiled.notes] for program in (whole, part)]
    assert notes[0] == notes[1]  # decisions may be fewer: the layers inside decide alike
    assert text_of(part.compiled) == text_of(whole.compiled)


@pytest.mark.parametrize(("mesh", "plan"), [("dp=2", "dp: auto"), broad("dp=2,tp=2", OPEN), broad("pp=2,dp=2", "dp: auto")])
def test_one_program_is_found(mesh: str, plan: str) -> None:
    same(*(compiled(depth, mesh=mesh, plan=plan) for depth in ("whole", "auto")))


def kept(found: meshc.Program, again: meshc.Program) -> None:
    """What was found at depth is text, by which as much is captured, and which gives the same program."""
    assert found.lowered.depth is not None and again.lowered.depth is not None
    assert not [note for note in found.compiled.notes if "has no text" in note]
    assert "auto" not in str(found.plan) and str(again.plan) == str(found.plan)
    assert text_of(again.compiled) == text_of(found.compiled)


@pytest.mark.parametrize(("mesh", "plan"), [broad("dp=2", "dp: auto"), broad("dp=2,tp=2", OPEN), broad("pp=2,dp=2", "dp: auto")])
def test_what_is_found_at_depth_compiles_at_depth(mesh: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiled("auto", mesh=mesh, plan=plan)
    monkeypatch.setattr("meshc.passes.driver.choose.PlanSearch", None)
    kept(found, compiled("auto", mesh=mesh, plan=str(found.plan)))


@pytest.mark.broad
@pytest.mark.parametrize("share", [0.97, 0.85])
def test_so_does_what_is_found_within_a_budget(share: float) -> None:
    budget = int(share * peak_memory.peak_rank(compiled("auto", mesh="dp=4").compiled).total)
    found = compiled("auto", mesh="dp=4", budget=budget)
    kept(found, compiled("auto", mesh="dp=4", plan=str(found.plan)))


@pytest.mark.broad
@pytest.mark.parametrize(("name", "sizes"), [("llama", {"num_hidden_layers": 7}), ("gpt2", {"n_layer": 7}), ("t5", {"num_layers": 6})])
@pytest.mark.parametrize("plan", [OPEN, "dp: batch; store state\ntp: auto"])
def test_so_does_what_is_found_for_stock_models(name: str, sizes: dict[str, int], plan: str) -> None:
    """GPT-2 adds up gradients of its embedding at both ends, T5 those of a bias that all layers read."""

    def stock(plan: str) -> meshc.Program:
        case = replace(STOCK[name], sizes={**STOCK[name].sizes, **sizes}).case(name)
        step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), clip_grad_norm=1.0)
        return meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=case.kwargs, plan=plan)

    found = stock(plan)
    kept(found, stock(str(found.plan)))


BY_NUMBER = """
    dp: batch
    tp: ffn
    store layers.0.up.weight params: ffn/tp, _
    store layers.[1-5].up.weight params: ffn/tp/dp, _
    pin op:layers.6/forward: -/tp
"""


def test_lines_about_layers_by_their_numbers_are_about_those_that_stand_for_them() -> None:
    """Seven layers, of which the first, those inside and the last do otherwise: the numbers are those of the whole model."""
    whole, part = (compiled(depth, layers=7, mesh="dp=2,tp=2", plan=BY_NUMBER) for depth in ("whole", "auto"))
    assert part.lowered.depth is not None and len(part.lowered.depth.captured["layers"]) < 7
    assert text_of(part.compiled) == text_of(whole.compiled)
    lies = {port.name: str(port.sharding) for port in part.compiled.inputs if port.kind == "parameter" and "up.weight" in port.name}
    assert [text.count("/dp") for text in lies.values()] == [0, 1, 1, 1, 1, 1, 0]


def test_captured_patterns() -> None:
    depth = Depth((Stretch("layers", 0, 1, 27),), {"layers": (0, 1, 2, 30)}, None)  # type: ignore[arg-type]
    assert captured_patterns("layers.0.up", depth) == ("layers.0.up",)
    assert captured_patterns("layers.[1-9].up", depth) == captured_patterns("layers.17.up", depth) == ("layers.1.up",)
    assert captured_patterns("layers.[12][0-9].up", depth) == ("layers.1.up", "layers.2.up")
    assert captured_patterns("value:layers.30", depth) == ("value:layers.3",)
    assert captured_patterns("layers.30/backward/add.2", depth) == ("layers.3/backward/add.2",)
    for other in ("layers.*.up", "*.up", "embed", "layers.40.up", "layers", "head.30"):
        assert captured_patterns(other, depth) == (other,)


def test_captured_names() -> None:
    """The last layer of all is the last of those captured, whichever number that has in the list."""
    depth = Depth((Stretch("layers", 0, 2, 13),), {"layers": tuple(range(6))}, None)  # type: ignore[arg-type]
    named = {number: captured_name(f"layers.{number}.up", depth) for number in (0, 1, 2, 3, 27, 28, 29, 30, 31, 32)}
    assert [name.split(".")[1] for name in named.values()] == ["0", "1", "2", "1", "1", "2", "3", "4", "5", "32"]
    assert captured_name("layers.31", depth) == "layers.5" and captured_name("layers", depth) == "layers"
    assert captured_name("embed", depth) == captured_name("embed", None) == "embed"


@pytest.mark.broad
def test_a_budget_is_kept_by_the_whole_model() -> None:
    whole = compiled("whole", mesh="dp=4")
    budget = int(0.97 * peak_memory.peak_rank(whole.compiled).total)
    part = compiled("auto", mesh="dp=4", budget=budget)
    assert part.lowered.depth is not None
    assert peak_memory.peak_rank(part.compiled).total <= budget < peak_memory.peak_rank(whole.compiled).total


@pytest.mark.parametrize(("name", "layers"), [broad("llama", 5), broad("llama", 12), broad("gpt2", 12)])
def test_weights_are_those_of_the_whole_model(name: str, layers: int) -> None:
    """Four layers stand for all: each choice costs what it costs in the whole model, and holds at its fullest what it holds there."""
    case = getattr(models, name)(layers=layers)
    part = Captured(case, train=True, double=False).traced
    asked = replace(part.request, mesh=Mesh("dp=2,tp=2"), plan=OPEN, clip_grad_norm=1.0)
    asked = replace(asked, optimizer=describe(torch.optim.AdamW(asked.module.parameters())))
    traces = [driver.trace(asked.having(depth="whole")), part.copy_for_request(asked)]
    whole, part = (PlanSearch(run_pass(pipeline.PLACE[0], driver.update_and_factorize(each)), device("h100")) for each in traces)
    assert whole.placed.depth is None and part.placed.depth is not None
    assert len(part.space.decisions) < len(whole.space.decisions)
    for mine, theirs in zip(part.model.own, whole.model.own, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
    chance = np.random.default_rng(0)
    for _ in range(20):
        pick = tuple(int(chance.integers(len(own))) for own in whole.model.own)
        assert part.model.seconds(pick) == pytest.approx(whole.model.seconds(pick), rel=1e-9)
        assert part.memory.walk(pick).max() == pytest.approx(whole.memory.walk(pick).max(), rel=1e-9)


@pytest.mark.broad
def test_what_fits_nowhere_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model is not searched again: what was found is of all its layers."""
    searches: list[PlanSearch] = []
    made = PlanSearch.__post_init__
    monkeypatch.setattr(PlanSearch, "__post_init__", lambda self: (searches.append(self), made(self))[1])
    with pytest.raises(PlanError, match="no plan for dp keeps a rank within 1,000 bytes"):
        compiled("auto", budget=1000)
    (search,) = searches
    assert search.placed.depth is not None


def test_names_in_the_whole_model() -> None:
    stretches = (Stretch("dense", 0, 1, 2), Stretch("layers", 0, 2, 1, 2, 2))
    depth = Depth(stretches, {}, None)  # type: ignore[arg-type]
    assert whole_names(depth, "dense.1.up") == ("dense.1.up", "dense.2.up", "dense.3.up")
    assert [whole_names(depth, f"dense.{layer}") for layer in (0, 2, 3)] == [("dense.0",), ("dense.4",), ("dense.5",)]
    assert whole_names(depth, "layers.3.up") == ("layers.3.up", "layers.5.up")
    assert whole_names(depth, "layers.4.up") == ("layers.6.up",)
    assert whole_names(depth, "embed") == ("embed",) == whole_names(None, "embed")


def test_two_stretches_of_one_list() -> None:
    depth = Depth((Stretch("layers", 0, 1, 5), Stretch("layers", 4, 1, 2)), {}, None)  # type: ignore[arg-type]
    assert whole_names(depth, "layers.1.up") == tuple(f"layers.{layer}.up" for layer in range(1, 7))
    assert whole_names(depth, "layers.5.up") == tuple(f"layers.{layer}.up" for layer in (10, 11, 12))
    assert whole_names(depth, "layers.7.up") == ("layers.14.up",)
