"""What is chosen where a plan leaves axes open: found by the planner, or a recipe, whichever the clock likes best within the budget."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshc.cost import peak_memory
from meshc.cost.devices import Link, device
from meshc.cost.program_clock import program_seconds
from meshc.errors import PlanError
from meshc.ir.mesh import Mesh
from meshc.optimizer.optimizer import describe
from meshc.passes import pipeline
from meshc.passes.depth.unequal import Unequal
from meshc.passes.driver import choose, compile_program, judge
from meshc.passes.driver.search_errors import NothingFits
from meshc.passes.pass_runner import run_pass
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from meshc.passes.planner.overlap_clock import overlapped_seconds
from meshc.passes.planner.plan_search import FoundChoice, PlanSearch
from meshc.passes.planner.relaxation import Allowance
from meshc.plan.combinations import combinations
from meshc.plan.plan import Plan
from meshc.plan.plan_candidate import PlanCandidate
from tests import models
from tests.captured import Captured
from tests.passes.planner.known import two


def adam(captured: Captured) -> dict[str, Any]:
    return dict(optimizer=describe(torch.optim.AdamW(captured.reference.module.parameters(), lr=1e-2)))


def left(captured: Captured, mesh: str, **ask: Any) -> LoweredProgram:
    """What the passes leave of a searched plan."""
    found: list[LoweredProgram] = []
    real = choose.choose

    def kept(*given: object) -> LoweredProgram:
        found.append(real(*given))  # type: ignore[arg-type]
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshc.passes.driver.compile_program.choose.choose", kept)
        captured.program(mesh, "auto", **ask)
    return found[-1]


def two_products() -> models.Case:
    model = torch.nn.Sequential(torch.nn.Linear(24, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    return models.Case("two products", model, {"input": torch.randn(8, 24)}, F.cross_entropy, {"target": torch.randint(10, (8,))})


def test_a_choice_is_compiled_if_its_estimate_is_below_the_best_programs_seconds() -> None:
    """Of a step in one piece; of one in parts estimates are of one part, and the latest program says how they compare."""
    for microbatches in (1, 2):
        request = SimpleNamespace(mesh=Mesh("dp=2"), beaten_s=None, count=microbatches)
        judged = judge.Judge(SimpleNamespace(request=request), None, None)  # type: ignore[arg-type]
        judged.best = SimpleNamespace(seconds=2.0)  # type: ignore[assignment]
        judged.lowered = [(PlanCandidate("found", "", seconds=2.0, estimated=1.8), None)]  # type: ignore[list-item]
        given = [PlanCandidate("found", "", estimated=estimated) for estimated in (1.79, 1.95, 2.05)]
        slow = [judged.is_too_slow(one, judged.last_ratio(), 0.0) for one in given]
        assert slow == [False, microbatches > 1, True]


def test_what_is_taken_is_no_slower_than_any_recipe_by_the_clock() -> None:
    captured = Captured(two_products(), train=True, double=False)
    ask = adam(captured)
    table = left(captured, "dp=2,tp=2", **ask).weighed
    assert table[0].dropped == "" and all(one.dropped for one in table[1:])
    assert {name for name, _ in combinations(["dp", "tp"])} <= {one.name for one in table}
    assert table[0].seconds is not None
    for name, entries in combinations(["dp", "tp"]):
        program = captured.program("dp=2,tp=2", Plan.of(entries), **ask)
        assert program_seconds(program).total >= table[0].seconds, name


def test_every_recipe_has_a_price_and_few_go_through_all_passes() -> None:
    captured = Captured(two_products(), train=True, double=False)
    table = left(captured, "dp=2,tp=2", **adam(captured)).weighed
    recipes = [one for one in table if one.name != choose.FOUND]
    assert len(recipes) == 13 and all(one.modelled is not None and one.holds for one in recipes)
    assert sum(one.seconds is not None for one in recipes) <= choose.TRIES


def test_a_recipe_that_does_what_was_found_does_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same program under another name. As if the search had found the first of the recipes."""
    captured = Captured(models.mlp(batch=8, width=64), train=True, double=False)
    ask = adam(captured)

    def solved(finding: choose._CandidateSearch, *_: object) -> list[FoundChoice]:
        search = finding.search
        return [search._with_certificate(search.pick_of(search.beside[0]), 0.0, None)]

    monkeypatch.setattr(choose._CandidateSearch, "_find_choices", solved)
    taken, *others = left(captured, "dp=4", **ask).weighed
    (same,) = [one for one in others if one.dropped == choose.SAME]
    program = captured.program("dp=4", Plan(same.plan), **ask)
    assert (taken.name, same.name, same.seconds) == (choose.FOUND, "ddp", None)
    assert program_seconds(program).total == taken.seconds


@pytest.mark.parametrize("most", [1, 2])
def test_no_more_choices_than_are_allowed_go_through_all_passes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within this budget two are tried, the second the faster one; with one alone that is taken."""
    weighed: list[str] = []
    real = judge.Judge.weigh
    monkeypatch.setattr(judge.Judge, "weigh", lambda *given: weighed.append(given[1].name) or real(*given))
    monkeypatch.setattr("meshc.passes.driver.choose.Allowance", lambda: Allowance(candidates=most))
    captured = Captured(models.mlp(), train=True, double=False)
    table = left(captured, "dp=2,tp=2", **adam(captured), memory_budget=17_000).weighed
    assert weighed == [choose.HIDES] * most and table[0].name == choose.HIDES
    assert any(one.dropped == choose.ENOUGH for one in table) == (most == 1)


@pytest.mark.parametrize("share", [0.4, pytest.param(0.7, marks=pytest.mark.broad)])
def test_what_fits_with_its_head_in_chunks_is_weighed(share: float) -> None:
    """Whole logits are most of what a rank holds here, and no recipe keeps the budget with them."""
    ids = torch.randint(640, (16, 32))
    words = torch.nn.Sequential(torch.nn.Embedding(640, 16), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 640))
    case = models.Case("words", words, {"input": ids}, lambda out, target: F.cross_entropy(out.mT, target), {"target": ids})
    captured = Captured(case, train=True, double=False)
    ask = adam(captured)
    budget = int(share * peak_memory.peak_rank(captured.program("dp=2", "fsdp", **ask, remat="none")).total)
    taken = left(captured, "dp=2", **ask, memory_budget=budget)
    assert peak_memory.peak_rank(taken.as_program()).total <= budget and taken.weighed[0].seconds is not None
    for name, entries in combinations(["dp"]):
        program = captured.program("dp=2", Plan.of(entries), **ask, memory_budget=budget)
        assert any("head and loss run in" in note for note in program.notes)
        assert program_seconds(program).total >= taken.weighed[0].seconds, name


def test_a_recipe_is_taken_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all that the planner finds held too much."""
    captured = Captured(models.mlp(width=400), train=True, double=False)
    ask = adam(captured)
    budget = peak_memory.peak_rank(captured.program("dp=4", "fsdp", **ask)).total
    monkeypatch.setattr("meshc.passes.planner.plan_search.PlanSearch.find_choices", lambda *_: [])
    taken = left(captured, "dp=4", **ask, memory_budget=budget)
    assert taken.weighed[0].name == "fsdp" and peak_memory.peak_rank(taken.as_program()).total <= budget
    assert str(taken.plan) == "dp: batch; store params, grads, state"
    assert any("dp: searched; nothing was found within the budget; fsdp is taken" in note for note in taken.notes)


def test_a_recipe_stands_in_for_what_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing that is found could be said of all layers: there is a certificate, and no program to be slower than the recipe's."""
    captured = Captured(models.mlp(), train=True, double=False)
    real = compile_program._lower_or_unchunk

    def lowered(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
        if placed.choices is not None:
            raise Unequal("the first layer is another")
        return real(placed, hook)

    monkeypatch.setattr("meshc.passes.driver.compile_program._lower_or_unchunk", lowered)
    taken = left(captured, "dp=4", **adam(captured))
    assert {one.dropped for one in taken.weighed if one.name in (choose.FOUND, choose.HIDES)} == {judge.UNLIKE}
    (note,) = (note for note in taken.notes if "searched;" in note)
    assert note.startswith("dp: searched; ") and "by the model" in note and note.endswith(f" options; {taken.weighed[0].name} is taken")


@pytest.mark.broad
def test_nothing_fits_and_what_would() -> None:
    captured = Captured(models.mlp(width=400, batch=8), train=True, double=False)
    ask = adam(captured)
    least = min(peak_memory.peak_rank(captured.program("dp=4", plan, **ask)).total for plan in ("ddp", "fsdp", "dp: auto"))
    with pytest.raises(PlanError) as caught:
        captured.program("dp=4", "auto", **ask, memory_budget=1000)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("no plan for dp keeps a rank within 1,000 bytes (Options(memory_budget=1000)); the least that one was found")
    assert int(lines[0].rpartition(" ")[2].rstrip(":").replace(",", "")) <= least
    assert lines[1].endswith("that a call makes and reads again")
    assert lines[2].startswith("  most of it when that is most, at ") and all(" B " in line or "B  " in line for line in lines[3:-1])
    assert lines[-1].startswith("  what to do: Options(memory_budget=") and "times the ranks" in lines[-1]


@pytest.mark.broad
def test_what_fits_by_no_choice_is_asked_by_one_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float | None, float | None]] = []
    real = PlanSearch.find_choices

    def noted(search: PlanSearch, budget: float | None = None) -> list[FoundChoice]:
        asked.append((search._hidden, budget))
        return real(search, budget)

    monkeypatch.setattr(PlanSearch, "find_choices", noted)
    captured = Captured(models.mlp(width=400, batch=8), train=True, double=False)
    with pytest.raises(PlanError):
        captured.program("dp=4", "auto", **adam(captured), memory_budget=1000, remat="none")
    assert asked[0] == (None, 1000.0) and {hidden for hidden, _ in asked} == {None}
    assert [budget for _, budget in asked if budget is not None].count(1000.0) == 1


@pytest.mark.broad
def test_more_microbatches_are_advised_where_they_would_do() -> None:
    captured = Captured(models.mlp(batch=64), train=True, double=False)
    ask = adam(captured)
    found = peak_memory.peak_rank(captured.program("dp=2", "fsdp", **ask))
    stays = sum(found.kept.values()) + found.peak.gradients
    with pytest.raises(NothingFits) as caught:
        captured.program("dp=2", "auto", **ask, memory_budget=stays + (found.total - stays) // 3)
    assert "TrainStep(microbatches=" in str(caught.value.with_changes_tried()).partition("what to do: ")[2]


def test_a_price_by_the_model_is_that_of_what_propagate_decides() -> None:
    """Beside the options that the search makes up: the same price as where there are no others."""
    placed = two(2048, 16384, 65536, "dp=2,tp=8", "dp: auto\ntp: auto")
    given = run_pass(pipeline.PLACE[0], placed.with_request(replace(placed.request, plan="dp: batch; store state\ntp: ffn")))
    search = PlanSearch(placed, device("h100"), ["dp", "tp"], (assigned := run_pass(pipeline.PLACE[1], given).require_assignment(),))
    (alone,) = PlanSearch(given, device("h100"), ()).find_choices()
    (found,) = search.find_choices()
    pick = search.pick_of(assigned)
    assert search.model.seconds(pick) == pytest.approx(alone.certificate.seconds)
    assert search.held_bytes(pick) == pytest.approx(alone.certificate.held)
    assert found.certificate.seconds <= search.model.seconds(pick)


def test_another_objective_that_begins_with_the_first_ones_answer_comes_to_the_same() -> None:
    placed = two(2048, 16384, 65536, "dp=2,tp=8", "dp: auto\ntp: auto")
    cold, warm = (PlanSearch(placed, device("h100"), ["dp", "tp"]) for _ in range(2))
    first = warm.find_choices()[0]
    for part in (0.5, 0.1):
        (one,), (other,) = cold.with_overlap(part).find_choices(), warm.with_overlap(part).find_choices()
        assert one.certificate.seconds == pytest.approx(other.certificate.seconds, rel=1e-6)
        assert other.certificate.bound <= other.certificate.seconds <= warm.with_overlap(part).model.seconds(first.pick)


def test_what_can_be_hidden_counts_as_far_as_it_is_waited_for() -> None:
    """Of two gradients the first travels beside the products of the second; over slow links it takes longer than they do."""
    placed = two(1 << 16, 4096, 16384, "dp=2,tp=8", "dp: auto\ntp: auto")
    given = run_pass(pipeline.PLACE[0], placed.with_request(replace(placed.request, plan="dp: batch\ntp: batch")))
    fast, link = device("h100"), Link(latency_s=1e-5, bandwidth_Bps=5e8)
    for on, hides in ((fast, True), (replace(fast, inside_node=link, between_nodes=link), False)):
        search = PlanSearch(given, on, ())
        pick = search.find_choices()[0].pick
        computing = float(sum(own[option] for own, option in zip(search.model.own, pick, strict=True)))
        seconds, sent = overlapped_seconds(search.model, pick), search.model.seconds(pick) - computing
        assert computing <= seconds <= search.model.seconds(pick)
        assert search.with_overlap(0.0).least_s <= seconds
        assert (seconds - computing == pytest.approx(sent / 2, rel=0.05)) == hides
        assert hides or seconds - computing > 0.9 * sent
    for contention in (0.5, 1.0, 1.5):  # computing loses as much as it hides, or a part, or more
        search = PlanSearch(given, replace(fast, contention=contention), ())
        pick = search.find_choices()[0].pick
        computing = float(sum(own[option] for own, option in zip(search.model.own, pick, strict=True)))
        whole, seconds = search.model.seconds(pick), overlapped_seconds(search.model, pick)
        assert seconds - computing == pytest.approx((1 + contention) / 2 * (whole - computing), rel=0.05)
        assert search.with_overlap(0.0).least_s <= min(seconds, whole) * (1 + 1e-12)
        assert search.with_overlap().model.seconds(pick) == pytest.approx(computing + contention * (whole - computing), rel=0.01)
