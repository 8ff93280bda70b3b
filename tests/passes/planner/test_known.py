"""Choices that a person would have made: what to split where links are slow, where the model is large, where memory is short."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from meshc.cost.devices import Device, Link, device
from meshc.ir import op_name
from meshc.passes.place.annotate import annotate
from meshc.passes.place.assign import assign
from meshc.passes.planner.certificate import Certificate
from meshc.passes.planner.plan_search import PlanSearch, axis_choices
from meshc.passes.planner.write_plan import choose_entries
from tests.passes.planner.known import Two, products, step, two

OPEN = "dp: auto\ntp: auto"
H100 = device("h100")


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1 << 20, 256)
        self.layers = nn.ModuleList(Two(256, 512) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer.down(torch.relu(layer.up(x)))
        return x.square().sum()


def slow() -> Device:
    """Every link as between two racks."""
    link = Link(latency_s=1e-5, bandwidth_Bps=5e9)
    return replace(H100, inside_node=link, between_nodes=link)


def test_slow_links_and_a_small_model_give_data_parallelism() -> None:
    placed = two(1 << 22, 256, 1024, "dp=2,tp=8", OPEN)
    (found,) = PlanSearch(placed, slow()).find_choices()
    assert products(placed, found.choices) == [{"dp": "batch", "tp": "batch"}] * 5  # x's own gradient nobody wants
    assert found.certificate.gap < 0.01


def test_a_large_model_and_fast_links_give_tensor_parallelism_inside_the_node() -> None:
    placed = two(2048, 16384, 65536, "dp=2,tp=8", OPEN)
    (found,) = PlanSearch(placed, H100).find_choices()
    up, down, *backward = products(placed, found.choices)
    assert up["tp"] == down["tp"] == "ffn"
    assert all(row["tp"] == "ffn" for row in backward)
    assert found.certificate.gap < 0.01


def test_a_tight_budget_splits_what_is_stored() -> None:
    """Data parallelism, with whole parameters as long as they fit: what splits them costs their gathers."""
    placed = two(1 << 18, 4096, 16384, "dp=8", "dp: auto")
    search = PlanSearch(placed, slow())
    (free,) = search.find_choices()
    budget = 0.97 * free.certificate.held
    tight = search.find_choices(budget)[0]
    assert tight.certificate.held <= budget < free.certificate.held
    assert tight.certificate.seconds >= tight.certificate.bound >= free.certificate.seconds - 1e-9
    assert tight.certificate.gap < 0.01
    for found, split in ((free, set()), (tight, {"dp"})):
        assert all(found.choices.storage[name, "parameter"].split_axes() == split for name in ("up.weight", "down.weight"))
        assert all(found.choices.storage[name, "state"].split_axes() == {"dp"} for name in ("up.weight", "down.weight"))
        assert products(placed, found.choices) == [{"dp": "batch"}] * 5


def test_what_no_choice_keeps_has_no_answer() -> None:
    placed = two(1 << 16, 4096, 16384, "dp=2,tp=8", "dp: batch\ntp: auto")
    assert PlanSearch(placed, H100, ["tp"]).find_choices(1e6) == []


def test_axes_that_the_plan_gives_do_as_it_says() -> None:
    placed = two(2048, 16384, 65536, "dp=2,tp=8", "dp: ffn\ntp: auto")
    (found,) = PlanSearch(placed, H100, ["tp"]).find_choices()
    assert all(row["dp"] == "ffn" for row in products(placed, found.choices))


def test_pins_hold() -> None:
    placed = two(1 << 20, 256, 1024, "dp=2,tp=8", OPEN + "\npin value:up: _, ffn/tp\nstore down.weight: _, ffn/dp")
    (found,) = PlanSearch(placed, H100).find_choices()
    assert products(placed, found.choices)[0]["tp"] == "ffn"
    for kind in ("parameter", "gradient", "state"):
        assert str(found.choices.storage["down.weight", kind]).endswith("ffn 1024/dp]")


def test_storage_that_an_earlier_program_has_settled_stays() -> None:
    """A parameter lies as it was laid; its state, which is this program's, as is best."""
    placed = two(1 << 20, 256, 1024, "dp=2,tp=8", OPEN)
    (free,) = PlanSearch(placed, H100).find_choices()
    pinned = two(1 << 20, 256, 1024, "dp=2,tp=8", OPEN + "\nstore up.weight params: ffn/tp, _")
    laid = PlanSearch(pinned, H100).find_choices()[0].choices.storage["up.weight", "parameter"]
    assert laid != free.choices.storage["up.weight", "parameter"]
    search = PlanSearch(replace(placed, request=replace(placed.request, fixed={"up.weight": laid})), H100)
    (found,) = search.find_choices()
    assert found.choices.storage["up.weight", "parameter"] == laid
    assert len(search.model.decision(search.folded.of["parameter", "up.weight"]).options) == 1
    assert len(search.model.decision(search.folded.of["state", "up.weight"]).options) > 1


def test_a_great_embedding_does_not_decide_for_all() -> None:
    """A thousand times the bytes of the products, and one operator of many: the axis's line is what most kinds of operators do."""
    with torch.device("meta"):
        model, ids = Embedded(), torch.zeros(64, 32, dtype=torch.int64)
    placed = step(model, {"ids": ids}, "tp=8", "tp: auto", lambda out: out)
    given = placed.with_request(replace(placed.request, plan="tp: vocab, ffn"))
    plan = assign(annotate(given)).require_assignment()
    search = PlanSearch(placed, H100, beside=(plan,))
    made = axis_choices(placed, search.space, search.folded, search.pick_of(plan))
    (embedding,) = [node for node in made.tokens if op_name(node) == "aten.embedding"]
    assert {placed.names.of[placed.factors.instances[embedding].factor[token]] for token in made.tokens[embedding]} == {"vocab"}
    found = choose_entries(replace(placed, choices=made), ["tp"])["tp"]
    assert found.terms[0].factor == "ffn"


@pytest.mark.parametrize("plan", [OPEN, "dp: batch\ntp: auto"])
def test_a_search_is_the_same_each_time(plan: str) -> None:
    placed = two(2048, 16384, 65536, "dp=2,tp=8", plan)
    axes = ["dp", "tp"] if plan == OPEN else ["tp"]
    one, other = (PlanSearch(placed, H100, axes).find_choices()[0] for _ in range(2))
    assert (one.choices, one.certificate) == (other.choices, other.certificate)


def test_a_certificate_says_how_far_from_the_best() -> None:
    certificate = Certificate(seconds=0.2, bound=0.198, held=1e9, budget=4e9, classes=3, options=10)
    assert certificate.gap == pytest.approx(0.01)
    assert str(certificate) == (
        "200.000 ms by the model within 4.00 GB, at best 198.000 ms: a gap of 1.00% over 3 decisions with 10 options"
    )


def test_no_operator_is_left_without_a_choice() -> None:
    placed = two(2048, 16384, 65536, "dp=2,tp=8", OPEN)
    (found,) = PlanSearch(placed, H100).find_choices()
    computing = [n for n in placed.graph.nodes if n.op == "call_function" and op_name(n) in ("aten.mm", "aten.relu", "aten.sum")]
    assert computing and all(node in found.choices.tokens for node in computing)
