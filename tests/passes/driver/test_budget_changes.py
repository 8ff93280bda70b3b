"""A budget that is refused: what is named does keep it, and holds what is said."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import meshc
from meshc.cost import peak_memory
from meshc.errors import PlanError
from meshc.passes.driver import budget_changes
from meshc.passes.driver.search_errors import NothingFits


class Words(nn.Module):
    """A wide head, or a wide middle: what is held is logits, or parameters with their state."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Embedding(11, 8), nn.Linear(8, hidden), nn.Linear(hidden, 8), nn.Linear(8, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(self.embed(ids)))))


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def step(words: int, hidden: int, plan: str = "dp: batch", microbatches: int = 1, seq: int = 8, **options: Any) -> meshc.Program:
    model = Words(words, hidden)
    made = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy, microbatches=microbatches)
    ids = torch.zeros(16, seq, dtype=torch.int64)
    inputs = {"args": (ids,), "kwargs": {"target": ids}}
    return meshc.compile(made, meshc.Mesh("dp=2"), plan=plan, options=meshc.Options(**options), **inputs)


def held(program: meshc.Program) -> int:
    return peak_memory.peak_rank(program.compiled).total


def refusal(words: int, hidden: int, **options: Any) -> str:
    with pytest.raises(PlanError) as caught:
        step(words, hidden, **options)
    return str(caught.value)


def changes(text: str) -> dict[str, int]:
    """What is advised, with the bytes that it is said to hold."""
    advice = text.partition("what to do: ")[2]
    return {said: int(size.replace(",", "")) for said, size in re.findall(r"(?:^|; or )([^;]*?(?:; store[^;]*?)?): ([\d,]+) bytes", advice)}


def with_change(said: str, **options: Any) -> dict[str, Any]:
    """As a user would write it."""
    asked: dict[str, Any] = {"plan": "dp: batch", **options}
    for one in said.split(" and "):
        if found := re.search(r"microbatches=(\d+)", one):
            asked["microbatches"] = int(found[1])
        elif found := re.search(r"remat='(\w+)'", one):
            asked["remat"] = found[1]
        else:
            line = re.search("`(.*)`", one)
            assert line is not None, one
            asked["plan"] = asked["plan"].replace("dp: batch", line[1]) if line[1].startswith("dp:") else f"{asked['plan']}\n{line[1]}"
    return asked


def test_what_holds_the_memory_is_named_and_the_changes_keep_the_budget() -> None:
    """Most of it is logits: fewer of them at a time do, and where state lies does not."""
    options = {"memory_budget": held(step(512, 8, remat="none")) // 2, "remat": "none"}
    text = refusal(512, 8, **options)
    lines = text.splitlines()
    assert re.match(r"  most of it when that is most, at \w+", lines[2])
    assert re.match(r"\s+131.1 kB\s+float32 \[batch 16/dp \* seq 8, vocab 512\], ", lines[3]), text
    found = changes(text)
    assert {"`chunk head: 8` in the plan", "TrainStep(microbatches=4)"} <= set(found) or len(found) >= 2, text
    assert not any("offload" in said for said in found)
    assert "(tried, by " in text and "ms " in text
    for said, size in found.items():
        assert held(step(512, 8, **with_change(said, **options))) == size <= options["memory_budget"], said  # type: ignore[operator]


@pytest.mark.broad
def test_where_parameters_and_state_hold_it_they_are_stored_split() -> None:
    options = {"memory_budget": held(step(4, 2048, seq=1, remat="none")) * 7 // 10, "remat": "none", "seq": 1}
    found = changes(refusal(4, 2048, **options))
    said = next(one for one in found if "; store params, grads, state" in one)
    assert held(step(4, 2048, **with_change(said, **options))) == found[said]


def test_what_no_change_does_alone_several_do_and_else_the_closest_is_told() -> None:
    whole = held(step(512, 1024, remat="none"))
    for percent in (30, 1):
        options = {"memory_budget": whole * percent // 100, "remat": "none"}
        text = refusal(512, 1024, **options)
        (said, size), *_ = changes(text).items()
        assert " and " in said and held(step(512, 1024, **{**with_change(said, **options), "memory_budget": None})) == size
        assert (size > options["memory_budget"]) == ("which is not enough, and the least of what was tried" in text) == (percent == 1)


def deep(mesh: str, plan: str = "", microbatches: int = 1, **options: Any) -> meshc.Program:
    """No head: most is what forward leaves to backward, with parameters and state."""
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh())))
    made = meshc.TrainStep(
        model, optimizer=torch.optim.AdamW(model.parameters()), loss=nn.functional.mse_loss, microbatches=microbatches
    )  # fmt: skip
    x = torch.zeros(64, 16)
    return meshc.compile(made, meshc.Mesh(mesh), plan=plan, options=meshc.Options(**options), args=(x,), kwargs={"target": x})


def refused(**asked: Any) -> NothingFits:
    with pytest.raises(NothingFits) as caught:
        deep(**asked)
    return caught.value


def first_keeps_its_word(error: NothingFits, asked: dict[str, Any], make: Callable[..., meshc.Program] = deep) -> str:
    """What is named first keeps the budget, and holds what is said."""
    assert error.found is not None and error.least is not None and error.least > asked["memory_budget"]
    first, *_ = error.found.fits
    assert str(error).partition("what to do: ")[2].startswith(f"{first} (tried, by cpu's clock); or ")
    assert held(make(**{**asked, "plan": first.plan, **first.asks})) == first.holds <= asked["memory_budget"]
    return first.said


def test_changes_are_tried_where_backward_recomputes_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the search would keep within the budget one run says little: later passes add bytes, for which a round reserves more."""
    policies: list[object] = []
    measure = budget_changes.measure
    monkeypatch.setattr(
        budget_changes, "measure", lambda placed, lower: policies.append((lower, placed.request.options.remat)) or measure(placed, lower)
    )
    text = refusal(512, 1024, memory_budget=held(step(512, 1024, remat="none")) * 3 // 10)
    first, last = policies[0][0], policies[-1][0]  # type: ignore[index]
    assert first is not last and changes(text)
    assert set(policies) == {(first, "layer"), (last, None)}


@pytest.mark.broad
def test_over_a_pipeline_what_holds_it_is_named_and_changes_are_tried() -> None:
    """Of gpipe all microbatches are in flight, of 1f1b as many as there are ranks."""
    asked: dict[str, Any] = {"mesh": "pp=2", "microbatches": 4, "schedule": "gpipe", "remat": "none", "memory_budget": 19_000}
    error = refused(**asked)
    lines = str(error).splitlines()
    said = rf"a rank of the pipeline may hold 19,000 bytes .*, but gpipe with microbatches=4 holds {error.least:,} on rank"
    assert re.match(said, lines[0]) and re.match(r"  most of it when that is most, at \w+", lines[2])
    assert " x float32 [batch 64/mb, " in lines[3]
    assert error.least == held(deep(**{**asked, "memory_budget": error.least}))
    assert "Options(schedule='1f1b')" in first_keeps_its_word(error, asked)


@pytest.mark.broad
def test_over_a_pipeline_state_goes_to_the_host() -> None:
    asked = {"mesh": "pp=2", "microbatches": 4, "memory_budget": 19_000}
    assert "`offload state` in the plan" in first_keeps_its_word(refused(**asked), asked)


@pytest.mark.broad
def test_of_a_search_changes_are_tried_with_the_plan_that_holds_least() -> None:
    asked = {"words": 512, "hidden": 64, "plan": "auto", "remat": "none", "memory_budget": 305_000}
    with pytest.raises(NothingFits) as caught:
        step(**asked)  # type: ignore[arg-type]
    assert first_keeps_its_word(caught.value, asked, step) == "TrainStep(microbatches=2)"
    said = "tried with the plan that holds least of what was searched:\n    dp: batch; store params, grads, state"
    assert str(caught.value).endswith(said)
