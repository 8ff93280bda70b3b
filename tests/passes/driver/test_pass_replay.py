"""Sizes at which passes behind `partition` do the same: their program is put together from what they did once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import meshc
from meshc.ir.trail import Trail
from meshc.passes.driver import pass_replay
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt
from tests.passes.depth.stacks import Stack, cross_entropy

Calls = tuple[tuple[int, int], ...]


@pytest.fixture
def run_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each compilation that begins behind a shared trace, how often the passes behind `partition` have run for it."""
    found: list[int] = []
    lowered = pass_replay.PassReplay.lower

    def counted(self: Any, partitioned: Any, rest: Any) -> Any:
        found.append(0)

        def once(left: Any) -> Any:
            found[-1] += 1
            return rest(left)

        return lowered(self, partitioned, once)

    monkeypatch.setattr(pass_replay.PassReplay, "lower", counted)
    return found


def step_of(case: Case) -> meshc.TrainStep:
    return meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters(), lr=0.1), loss=case.loss, clip_grad_norm=1.0)


def tokens(case: Case, batch: int, seq: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, seq, dtype=value.dtype) for name, value in case.call_kwargs.items()}


def stack(layers: int = 6, **more: Any) -> Case:
    ids = torch.zeros(4, 3, dtype=torch.int64)
    return Case("stack", Stack([16] * layers, **more), {"ids": ids}, cross_entropy, {"target": ids})


LENGTHS: Calls = ((4, 12), (4, 20), (4, 28), (4, 24), (4, 36))
BOTH: Calls = ((4, 12), (4, 20), (6, 28), (8, 24), (4, 36), (10, 20))
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
OFTEN = ("nanogpt",)


def text_of(program: meshc.Program, name: str) -> list[str]:
    """Of sequence parallelism without the lines that values come from: a shared trace says some of a view that reads a parameter first."""
    lines = str(program).splitlines()
    return [line for line in (line.partition("  #")[0] for line in lines) if line.strip()] if name == "llama, sp" else lines


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
            assert text_of(program, name) == text_of(wanted, name), call
            assert program.compiled.info == wanted.compiled.info and program.compiled.notes == wanted.compiled.notes
            assert "sizes" in program.timings
    assert run_whole == [1, *[0] * (len(calls) - 3)]


LONG = 1 << 18


@pytest.fixture(scope="module")
def long() -> str:
    """The program that compiling this size gives."""
    case = short()
    return str(meshc.compile(step_of(case), meshc.Mesh("dp=2,tp=2"), kwargs=tokens(case, 4, LONG)))


def short() -> Case:
    return stack(layers=1)


def lengths_of(case: Case, program: meshc.Program, *lengths: int) -> None:
    for length in lengths:
        program.prepare((), tokens(case, 4, length))


def test_a_size_that_is_decided_otherwise_is_not_followed(run_whole: list[int], long: str) -> None:
    """A product that is summed over `tp` has memory of its own from 8 MiB on: [2, seq, 8] in float32 has them at 131,072 positions."""
    case = short()
    program = meshc.compile(step_of(case), meshc.Mesh("dp=2,tp=2"), kwargs=tokens(case, 4, 12))
    lengths_of(case, program, 20, 28, 44, LONG, LONG + 64, 36)
    assert run_whole[:2] == [1, 0] and run_whole[2:] == [1, 0, 0]
    program.prepare((), tokens(case, 4, LONG))
    assert str(program) == long


@pytest.mark.broad
def test_without_asking_it_would_be_another_program(monkeypatch: pytest.MonkeyPatch, long: str) -> None:
    asked = Trail.at

    def unasked(self: Any, *given: Any) -> Any:
        self.asked = {}
        return asked(self, *given)

    monkeypatch.setattr(Trail, "at", unasked)
    case = short()
    program = meshc.compile(step_of(case), meshc.Mesh("dp=2,tp=2"), kwargs=tokens(case, 4, 12))
    lengths_of(case, program, 20, 28, LONG)
    assert str(program) != long


@pytest.mark.broad
def test_a_budget_is_not_followed(run_whole: list[int]) -> None:
    case = short()
    program = meshc.compile(step_of(case), meshc.Mesh("dp=2"), kwargs=tokens(case, 4, 12), options=meshc.Options(memory_budget="1GB"))
    lengths_of(case, program, 20, 28, 44)
    assert run_whole == [] and "sizes" not in program.timings
