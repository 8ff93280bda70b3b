"""Programs that differ in what backward recomputes alone begin once, and are what they would be if each began anew."""

from __future__ import annotations

import re

import pytest
import torch

import meshc
from meshc.passes.driver import compile_program, pass_memo
from meshc.passes.phases.compiler_pass import Hook
from meshc.passes.phases.lowered_program import LoweredProgram
from meshc.passes.phases.placed_model import PlacedModel
from tests.passes.driver.test_budget_changes import Words, cross_entropy, refusal, step


def text(budget: int) -> str:
    model = Words(64, 256)
    made = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=cross_entropy)
    ids = torch.zeros(16, 8, dtype=torch.int64)
    options = meshc.Options(memory_budget=budget)
    return str(meshc.compile(made, meshc.Mesh("dp=2"), options=options, args=(ids,), kwargs={"target": ids}))


@pytest.mark.usefixtures("patches_behind")
def test_a_program_is_the_same_and_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count, asked = 0, 0
    plain, remembering = pass_memo.run_before_recompute, pass_memo.PassMemo.run_before_recompute

    def begin(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
        nonlocal count
        count += 1
        return plain(placed, hook)

    def once(self: pass_memo.PassMemo, placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
        nonlocal asked
        asked += 1
        return remembering(self, placed, hook)

    monkeypatch.setattr(pass_memo, "run_before_recompute", begin)
    monkeypatch.setattr(pass_memo.PassMemo, "run_before_recompute", once)
    said = refusal(64, 256, memory_budget=1)
    assert asked > count > 0
    (least,) = re.findall(r'memory_budget="?([\d.]+)"?\), where', said)
    found = text(int(least))
    monkeypatch.setattr(pass_memo.PassMemo, "run_before_recompute", lambda self, placed, hook: plain(placed, hook))
    assert refusal(64, 256, memory_budget=1) == said and text(int(least)) == found


@pytest.mark.broad
@pytest.mark.usefixtures("patches_behind")
def test_changes_begin_once_as_they_are_tried_and_as_they_are_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last beginning alone is remembered they begin more often, and the refusal says the same."""
    plain, counts, said = pass_memo.run_before_recompute, list[int](), list[str]()

    def begin(placed: PlacedModel, hook: Hook | None) -> LoweredProgram:
        counts[-1] += 1
        return plain(placed, hook)

    monkeypatch.setattr(pass_memo, "run_before_recompute", begin)
    for most in (None, 1):
        monkeypatch.setattr(compile_program, "PassMemo", lambda _=1, most=most: pass_memo.PassMemo(most))
        counts.append(0)
        said.append(refusal(64, 256, memory_budget=230_000))
    assert said[0] == said[1] and counts[0] < counts[1], (said, counts)


def test_what_is_asked_otherwise_begins_anew() -> None:
    """What differs in more than what is recomputed: here the number of chunks, of which each has its own program."""
    texts = {str(step(64, 256, plan=f"dp: batch\nchunk head: {count}", memory_budget=10**9)) for count in (2, 4)}
    assert len(texts) == 2
