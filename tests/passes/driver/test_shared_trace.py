"""Several sizes of one model: from the third on passes begin behind one trace, and give what compiling each by itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshc
from meshc.passes.driver import shared_trace
from tests.broad import broad
from tests.models import Case, gpt2, llama, mlp, nanogpt

Calls = tuple[tuple[int, int], ...]


def step_of(case: Case) -> meshc.TrainStep:
    return meshc.TrainStep(case.model, optimizer=torch.optim.SGD(case.model.parameters(), lr=0.1), loss=case.loss, clip_grad_norm=1.0)


@pytest.fixture
def open_traces(monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> list[Any]:
    """Which sizes were left open, trace by trace."""
    found: list[Any] = []
    trace = shared_trace.trace_open

    def noted(request: Any, dims: Any) -> Any:
        found.append(dims.dims)
        return trace(request, dims)

    monkeypatch.setattr(shared_trace, "trace_open", noted)
    return found


def tokens(case: Case, batch: int, seq: int) -> dict[str, Tensor]:
    return {name: torch.zeros(batch, seq, dtype=value.dtype) for name, value in case.call_kwargs.items()}


LENGTHS: Calls = ((4, 12), (4, 20), (4, 16), (4, 17))


@pytest.mark.parametrize(
    "make, mesh, calls, count",
    [
        (lambda: nanogpt(layers=1), "dp=2,tp=2", LENGTHS[:3], 1),
        broad(lambda: llama(layers=6), "dp=2,tp=2", LENGTHS, 1),
        broad(lambda: gpt2(layers=1), "dp=2,tp=2", LENGTHS, 1),
        broad(lambda: nanogpt(layers=1, dropout=0.2), "dp_shard=2,cp=2", (*LENGTHS, (3, 16), (5, 17)), 2),
        broad(lambda: nanogpt(layers=2), "pp=2", LENGTHS, 1),
    ],
    ids=["nanogpt", "six layers of llama", "gpt2", "dropout and two sizes", "pipeline"],
)
def test_a_further_size_is_the_program_that_compiling_it_gives(
    make: Callable[[], Case], mesh: str, calls: Calls, count: int, open_traces: list[Any]
) -> None:
    options = meshc.Options(seed=0)
    case = make()
    program = meshc.compile(step_of(case), meshc.Mesh(mesh), kwargs=tokens(case, *calls[0]), options=options)
    for call in calls[1:]:
        program.prepare((), tokens(case, *call))
        if call in calls[2:]:
            alone = make()
            wanted = meshc.compile(step_of(alone), meshc.Mesh(mesh), kwargs=tokens(alone, *call), options=options)
            assert str(program) == str(wanted), call
    assert len(open_traces) == count


class Branches(nn.Module):
    """Another model for long sequences than for short ones."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.long(x) if x.shape[1] > 10 else self.short(x)


def test_a_size_that_takes_another_way_is_compiled_by_itself(open_traces: list[Any]) -> None:
    model, mesh = Branches().requires_grad_(False), meshc.Mesh("dp=2")
    program = meshc.compile(model, mesh, args=(torch.zeros(4, 3, 8),))
    for length in (4, 5, 6, 12, 7, 13):
        program.prepare((torch.zeros(4, length, 8),), {})
        assert str(program) == str(meshc.compile(model, mesh, args=(torch.zeros(4, length, 8),))), length
    assert len(open_traces) == 1


def test_a_model_that_takes_no_open_sizes_is_not_tried_at_each(monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> None:
    tried: list[Any] = []

    def refused(request: Any, dims: Any) -> Any:
        tried.append(dims.dims)
        raise meshc.CaptureError("the model cannot be traced with these sizes open")

    monkeypatch.setattr(shared_trace, "trace_open", refused)
    program = meshc.compile(Branches().requires_grad_(False), meshc.Mesh("dp=2"), args=(torch.zeros(4, 3, 8),))
    for length in (4, 5, 6, 7):
        program.prepare((torch.zeros(4, length, 8),), {})
    assert tried == [{"x": {1: "size_0"}}]
    program.prepare((torch.zeros(6, 7, 8),), {})  # another dim differs
    assert len(tried) == 2


@pytest.mark.broad
def test_sizes_that_were_equal_and_differ_are_told_apart(open_traces: list[Any]) -> None:
    """Rows of two inputs are equal in three calls, and differ in the fourth, where a model can take that."""
    model, mesh = TwoInputs(), meshc.Mesh("dp=2")
    program = meshc.compile(model, mesh, args=(torch.zeros(4, 8), torch.zeros(4, 8)))
    for one, other in ((6, 6), (8, 8), (8, 6), (10, 4), (8, 1), (1, 8), (12, 12)):
        args = torch.zeros(one, 8), torch.zeros(other, 8)
        program.prepare(args, {})
        assert str(program) == str(meshc.compile(model, mesh, args=args)), (one, other)
    assert [len({name for row in dims.values() for name in row.values()}) for dims in open_traces] == [1, 2]


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y.sum(0)


def test_two_sizes_are_compiled_each_by_itself(open_traces: list[Any]) -> None:
    case = mlp()
    program = meshc.compile(step_of(case), meshc.Mesh("dp=2"), kwargs=case.call_kwargs)
    program.prepare((), {name: value[:4] for name, value in case.call_kwargs.items()})
    assert open_traces == []


def test_programs_that_were_not_used_for_longest_are_dropped() -> None:
    case = mlp()
    program = meshc.compile(
        step_of(case), meshc.Mesh("dp=2"), kwargs=case.call_kwargs, options=meshc.Options(debugging=meshc.Debugging(kept_sizes=2))
    )
    texts = {6: str(program)}
    for rows in (4, 6, 2, 4, 6):  # 4 goes when 2 comes, since 6 was used after it
        program.prepare((), {name: value[:rows] for name, value in case.call_kwargs.items()})
        assert str(program) == texts.setdefault(rows, str(program))
        assert len(program.compilations.kept) == len(program.compilations.general) == 2 - (len(texts) == 1)
    kept = [dict(zip(["x"], key.inputs[1], strict=False))["x"][1][0] for key in program.compilations.kept]
    assert kept == [4, 6]
