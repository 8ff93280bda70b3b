"""A budget with the host: values, state and parameters lie there where that takes less than recomputing values, and numbers stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import Link, assume_device, device
from meshc.cost.program_clock import program_seconds
from meshc.errors import PlanError
from meshc.ir import calls, local_bytes, record, spmd
from meshc.passes.memory.recompute_within_budget import BY_BUDGET_THERE
from tests.broad import broad
from tests.models import Case, gpt2, llama, nanogpt

MEBI = 1024 * 1024


def step_of(case: Case, mesh: str, plan: str | None = None, microbatches: int = 1, **asked: object) -> meshc.Program:
    sgd = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    # of a pipeline state is what can lie elsewhere: there is more of it
    optimizer = sgd if microbatches == 1 else torch.optim.AdamW(case.model.parameters(), lr=0.01)
    step = meshc.TrainStep(case.model, optimizer=optimizer, loss=case.loss, clip_grad_norm=1.0, microbatches=microbatches)
    return meshc.compile(step, meshc.Mesh(mesh), kwargs=case.call_kwargs, plan=plan, options=meshc.Options(**asked))  # type: ignore[arg-type]


def held(program: meshc.Program) -> peak_memory.RankBytes:
    return peak_memory.peak_rank(program.compiled)


def first_refused(make: Callable[..., Case], mesh: str, plan: str | None, microbatches: int) -> int:
    """A budget that nothing keeps without the host, and not much less than one that something keeps."""
    most = held(step_of(make(batch=16), mesh, plan, microbatches, remat="layer")).total
    for tenths in range(10, 0, -1):
        budget = most * tenths // 10
        try:
            step_of(make(batch=16), mesh, plan, microbatches, memory_budget=budget)
        except PlanError:
            return budget
    raise AssertionError("no budget is refused")


def small(batch: int) -> Case:
    return nanogpt(batch=batch, layers=1)


@pytest.mark.parametrize(
    "make, mesh, plan, microbatches",
    [
        broad(small, "dp=2", None, 1), broad(nanogpt, "dp=2", None, 1), broad(nanogpt, "dp_shard=2,tp=2", None, 1),
        broad(llama, "dp=2,tp=2", None, 1), broad(gpt2, "dp=2", "dp: batch; store state", 1), broad(nanogpt, "pp=2,dp=2", None, 2),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)  # fmt: skip
def test_what_only_the_host_makes_possible_means_what_it_means(
    make: Callable[..., Case], mesh: str, plan: str | None, microbatches: int
) -> None:
    room = 10**7
    budget = first_refused(make, mesh, plan, microbatches)
    program = step_of(make(batch=16), mesh, plan, microbatches, memory_budget=budget, host_budget=room)
    assert held(program).total <= budget and 0 < held(program).host <= room
    assert [note for note in program.compiled.notes if "a rank has on its host what `offload state" in note]
    assert {"gradient", "parameter after step 2"} <= {kind for kind, *_ in meshc.verify(program, dtype=torch.float64).rows}


class Wide(nn.Module):
    """Products of which each gives much and takes long: worth their copies."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 8192), nn.Sigmoid(), nn.Linear(8192, 64)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def wide(budget: int | None, room: int | None, **asked: object) -> meshc.Program:
    with torch.device("meta"):
        model = Wide()
        x = torch.zeros(65536, 64)
    step = meshc.TrainStep(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.functional.mse_loss)
    options = meshc.Options(memory_budget=budget, host_budget=room, **asked)  # type: ignore[arg-type]
    return meshc.compile(step, meshc.Mesh("dp=2", device="cuda"), plan="dp: batch", args=(x,), kwargs={"target": x}, options=options)


def there(program: meshc.Program) -> list[int]:
    """Bytes of each value that lies on the host for the budget."""
    graphs = [stage.graph for stage in program.compiled.stages.values()]
    return [
        local_bytes(record(node)) for graph in graphs for node in calls(graph)
        if node.target is spmd.to_host and record(node).reason == BY_BUDGET_THERE
    ]  # fmt: skip


FAST = replace(device("h100"), host=Link(1e-6, 2e12))
"""An H100 whose host is as near as its own memory."""


def seconds(program: meshc.Program) -> float:
    return program_seconds(program.compiled).total


@cache
def budget() -> int:
    return held(wide(None, None, remat="none")).total * 60 // 100


def test_where_copies_would_be_waited_for_nothing_is_slower_than_without() -> None:
    few, room = budget(), 64 * 1024 * MEBI
    slow = wide(few, room)
    assert sum(there(slow)) <= room and seconds(slow) <= seconds(wide(few, None))


def test_values_lie_there_where_that_is_faster() -> None:
    few, room = budget(), 64 * 1024 * MEBI
    with assume_device(FAST):
        fast, alone = wide(few, room), wide(few, None)
        assert there(fast) and held(fast).total <= few and held(fast).host <= room
        assert seconds(fast) < seconds(alone)
        assert [note for note in fast.compiled.notes if re.search(r"and finds \d+ on the host, [\d,]+ bytes", note)]


def test_no_more_lies_there_than_has_room() -> None:
    with assume_device(FAST):
        few = wide(budget(), 1100 * MEBI)
    assert 0 < sum(there(few)) <= 1100 * MEBI


@pytest.mark.broad
def test_of_values_that_are_alike_the_same_lie_there_whenever_it_is_compiled() -> None:
    with assume_device(FAST):
        texts = {str(wide(4984 * MEBI, 1100 * MEBI)) for _ in range(4)}
    assert len(texts) == 1


@pytest.mark.broad
def test_what_the_plan_keeps_there_counts() -> None:
    case = nanogpt(batch=16)
    program = step_of(case, "dp=2", "offload state", memory_budget=10**9, host_budget=10**7)
    on_host = held(program).host
    assert on_host > 0
    with pytest.raises(PlanError, match=rf"{on_host:,} bytes of a rank lie on its host by the plan, and it may use 1,000 there"):
        step_of(nanogpt(batch=16), "dp=2", "offload state", memory_budget=10**9, host_budget=1000)


def test_a_host_budget_alone_or_with_a_policy_is_refused() -> None:
    with pytest.raises(PlanError, match=r"there is none\n  what to do: say what it may hold"):
        meshc.Options(host_budget="4GB")
    with pytest.raises(PlanError, match="a policy says what is recomputed"):
        meshc.Options(host_budget="4GB", memory_budget="4GB", remat="layer")
