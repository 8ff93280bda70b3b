"""Sizes at which passes behind `partition` do the same: the program is put together from what they did once, and is the one that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.ir.trail import Trail
from meshc.passes.driver import follow
from tests.broad import broad
from tests.models import Case, gpt2, llama, mlp, nanogpt
from tests.passes.depth.stacks import Stack, cross_entropy

Calls = tuple[tuple[int, int], ...]


@pytest.fixture
def run_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each compilation that begins behind a shared trace, how often the passes behind `partition` have run for it."""
    found: list[int] = []
    lowered = follow.Following.lowered

    def counted(self: Any, partitioned: Any, rest: Any) -> Any:
        found.append(0)

        def once(left: Any) -> Any:
            found[-1] += 1
            return rest(left)

        return lowered(self, partitioned, once)

    monkeypatch.setattr(follow.Following, "lowered", counted)
    return found


def step_of(case: Case) -> meshc.TrainStep:
    return meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters(), lr=0.1), loss=case.loss, clip_grad_norm=1.0)


def tokens(case: Case, batch: int, seq: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, seq, dtype=value.dtype) for name, value in case.call_kwargs.items()}


def stack(**more: Any) -> Case:
    ids = torch.zeros(4, 3, dtype=torch.int64)
    return Case("stack", Stack([16] * 6, **more), {"ids": ids}, cross_entropy, {"target": ids})


LENGTHS: Calls = ((4, 12), (4, 20), (4, 16), (4, 24), (4, 32))
BOTH: Calls = ((4, 12), (4, 20), (6, 16), (8, 24), (4, 32), (10, 20))
PLANS = {
    "nanogpt": (lambda: nanogpt(layers=1), "dp=2,tp=2", None, LENGTHS),
    "six layers": (lambda: stack(), "dp=2", None, LENGTHS),
    "dropout": (lambda: stack(dropout=0.2), "dp_shard=2,tp=2", None, BOTH),
    "llama": (lambda: llama(layers=6), "dp=2,tp=2", None, LENGTHS),
    "llama, sp": (lambda: llama(layers=6), "dp_shard=2,tp=2", "fsdp+megatron_sp", LENGTHS),
    "gpt2, cp": (lambda: gpt2(layers=1), "dp_shard=2,cp=2", "fsdp+ulysses", BOTH),
    "gpt2": (lambda: gpt2(layers=6), "dp=2,tp=2", "ddp+megatron", BOTH),
    "ring": (lambda: llama(layers=1), "dp=2,cp=2", None, LENGTHS),
}
OFTEN = ("nanogpt", "six layers")


@pytest.mark.parametrize("name", [name if name in OFTEN else broad(name) for name in PLANS])
def test_a_size_that_is_followed_is_the_program_that_compiling_it_gives(name: str, run_whole: list[int]) -> None:
    make, mesh, plan, calls = PLANS[name]
    options, case = meshc.Options(seed=0), make()
    program = meshc.compile(step_of(case), meshc.Mesh(mesh), plan=plan, kwargs=tokens(case, *calls[0]), options=options)
    for number, call in enumerate(calls[1:], 1):
        program.prepare((), tokens(case, *call))
        if number >= 2:
            alone = make()
            wanted = meshc.compile(step_of(alone), meshc.Mesh(mesh), plan=plan, kwargs=tokens(alone, *call), options=options)
            assert str(program) == str(wanted), call
            assert program.compiled.info == wanted.compiled.info and program.compiled.notes == wanted.compiled.notes
            assert ("sizes" in program.timings) == (run_whole[-1] < 2)
    assert sum(run_whole[1:]) == 0
