"""Written storage: the lines that say a storage give it when they are read, whatever it is; and they are few."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

import meshc
from meshc.ir.sharding import Part, Sharding, tile_sizes
from meshc.passes.planner.write_plan import Storage, storage_lines
from meshc.plan.plan import Plan
from tests import models
from tests.broad import broad

SIZES = {"dp": 2, "tp": 2}


def lies(text: str, *factors: str) -> Sharding:
    """`64/tp/dp, 32`, with the names of the dims."""
    dims = [dim.split("/") for dim in text.split(", ")]
    return Sharding(tuple((Part(name, int(size), tuple(axes)),) for name, (size, *axes) in zip(factors, dims, strict=True)))


def storage(name: str, factors: tuple[str, ...], *kinds: str) -> Storage:
    return {(name, kind): lies(text, *factors) for kind, text in zip(("parameter", "gradient", "state"), kinds, strict=True)}


def written(wanted: Storage, given: Storage) -> list[str]:
    return [str(line) for line in storage_lines(wanted, given)]


def test_kinds_that_lie_alike_are_one_line() -> None:
    factors = ("vocab", "hidden")
    given = storage("head", factors, "64/tp, 32", "64/tp, 32", "64/tp, 32")
    assert written(given, given) == []
    assert written(storage("head", factors, "64/tp, 32", "64/tp, 32", "64/dp/tp, 32"), given) == ["store head state: vocab/dp/tp, _"]
    assert written(storage("head", factors, "64/tp/dp, 32", "64, 32/tp", "64/tp/dp, 32"), given) == [
        "store head grads: _, hidden/tp", "store head params, state: vocab/tp/dp, _",
    ]  # fmt: skip
    assert written(storage("head", factors, *["64, 32/dp"] * 3), given) == ["store head: vocab!, hidden/dp"], "tp would split it further"


def test_two_factors_of_one_name_are_told_apart() -> None:
    def halves(*axes: tuple[str, ...]) -> Storage:
        dim = tuple(Part("head", 4, each) for each in axes)
        return {("q", kind): Sharding((dim,)) for kind in ("parameter", "gradient", "state")}

    whole = halves((), ())
    assert written(halves(("dp",), ("tp",)), whole) == ["store q: head/dp * head/tp"]
    assert written(halves((), ("tp",)), whole) == ["store q: head * head/tp"]
    assert written(halves(("dp",), ()), whole) == ["store q: head/dp"]


def test_layers_that_lie_alike_are_one_line() -> None:
    def layers(*texts: str) -> Storage:
        return {
            key: value
            for number, text in enumerate(texts)
            for key, value in storage(f"layers.{number}.up", (f"layers.{number}.up.0", "hidden"), *[text] * 3).items()
        }

    assert written(layers("8/dp, 4", "8/dp, 4"), layers("8, 4", "8, 4")) == ["store layers.*.up: layers.*.up.0/dp, _"]
    assert written(layers("8/dp, 4", "8, 4"), layers("8, 4", "8, 4")) == ["store layers.0.up: layers.*.up.0/dp, _"]
    assert written(layers("8/dp, 4", "8, 4/dp"), layers("8, 4", "8, 4")) == [
        "store layers.0.up: layers.*.up.0/dp, _", "store layers.1.up: _, hidden/dp",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- read again, they give the same


@cache
def case(kind: str) -> Any:
    return models.FACTORIES[kind](batch=4, seq=8, layers=1 if kind == "nanogpt" else 2)


def decided(kind: str, plan: Plan) -> Storage:
    source = case(kind)
    step = meshc.TrainStep(source.model, optimizer=torch.optim.SGD(source.model.parameters(), lr=0.1), loss=source.loss)
    program = meshc.compile(step, meshc.Mesh("dp=2,tp=2"), kwargs=source.call_kwargs, plan=plan)
    return program.lowered.placed.require_assignment().storage


@pytest.mark.parametrize(
    ("kind", "entries", "seed"),
    [
        ("nanogpt", "dp: batch; store params, grads, state\ntp: heads, ffn, vocab", 0),
        broad("gpt2", "dp: batch; store params, grads, state\ntp: heads, ffn, vocab", 0),
        broad("llama", "dp: batch; store state\ntp: heads, ffn, vocab > seq", 1),
        broad("llama", "dp: batch\ntp: -", 2),
    ],
)
def test_lines_say_any_storage(kind: str, entries: str, seed: int) -> None:
    given = decided(kind, Plan(entries))
    draw = random.Random(seed)
    wanted = {key: drawn(sharding, draw) if draw.random() < 0.7 else sharding for key, sharding in given.items()}
    lines = storage_lines(wanted, given)
    text = str(Plan.of(Plan(entries).axes, stores=lines))
    assert decided(kind, Plan(text)) == wanted


def drawn(sharding: Sharding, draw: random.Random) -> Sharding:
    """Each axis splits some part that has anything left to split, or none."""
    found = sharding.whole()
    for axis in draw.sample(sorted(SIZES), len(SIZES)):
        places = [(d, p, part.axes) for d, p, part in found.parts() if tile_sizes(part.size, [SIZES[a] for a in part.axes])[-1] > 1]
        if places and draw.random() < 0.7:
            dim, position, axes = draw.choice(places)
            found = found.with_axes(dim, position, (*axes, axis))
    return found
