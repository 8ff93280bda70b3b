"""Programs of pipeline stages on simulated ranks against the model on one device, and how they are cut."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import RankDevices, device
from meshc.cost.pipeline_costs import costs_of
from meshc.ir import spmd
from meshc.passes.stages import pipeline_memory
from meshc.passes.stages.balance import SLACK, Numbers, best_cuts, least_cuts
from meshc.pipelining.schedule import StageLink
from meshc.pipelining.timing import simulate
from meshc.program.program import PlainProgram
from tests.broad import broad
from tests.models import nanogpt
from tests.pipelining.cells import FAMILIES, MESHES, SCHEDULES, captured, verify

SAMPLE = sorted(random.Random(4).sample(list(itertools.product(FAMILIES, SCHEDULES, MESHES)), 10))
QUICK = ("llama", "zb_v", "pp=4")


@pytest.mark.parametrize(
    "family, schedule, mesh", [cell if cell == QUICK else broad(*cell) for cell in SAMPLE]
)
def test_a_sample_of_the_table(family: str, schedule: str, mesh: str) -> None:
    assert verify(family, schedule, mesh).ok


class Blocks(nn.Module):
    """Four layers between a table and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = h + F.gelu(layer(h))
        return h @ self.table.weight.t()


def step(**options: object) -> tuple[meshc.Program, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Blocks()
    microbatches = options.pop("count", 2)
    mesh = meshc.Mesh("pp=2", device=str(options.pop("device", "cpu")))
    train = meshc.TrainStep(
        model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
        microbatches=microbatches, clip_grad_norm=1.0,
    )  # fmt: skip
    inputs = {"x": torch.randint(11, (4, 6)), "y": torch.randint(11, (4, 6))}
    program = meshc.compile(train, mesh, kwargs=inputs, options=meshc.Options(**options))  # type: ignore[arg-type]
    return program, inputs


def compiled(**options: object) -> PlainProgram:
    return step(**options)[0].compiled


def test_a_tied_weight_travels_once_a_call() -> None:
    program, inputs = step(schedule="1f1b", count=4, pp_splits=["layers.2"])
    pipeline = program.compiled.pipeline
    assert pipeline is not None
    assert [(move.key, move.source, move.target) for move in pipeline.shared] == [("parameter:table.weight", 0, 1)]
    assert [(move.source, move.target) for move in pipeline.returned] == [(1, 0)]
    assert [len(keys) for keys in pipeline.messages.values()] == [1, 1], "its gradient goes with no microbatch"
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


def test_cuts_at_named_modules() -> None:
    program, inputs = step(schedule="1f1b", pp_splits=["layers.1"])
    pipeline = program.compiled.pipeline
    assert pipeline is not None
    here = {key.removeprefix("parameter:layers."): rank for key, rank in pipeline.owners.items() if key.startswith("parameter:layers.")}
    assert {name: rank for name, rank in here.items() if name.endswith("weight")} == {
        "0.weight": 0, "1.weight": 1, "2.weight": 1, "3.weight": 1,
    }  # fmt: skip
    assert set(pipeline.messages) == {StageLink("F", 0, 1), StageLink("B", 1, 0)}
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


@pytest.mark.parametrize(
    "options, said",
    [
        ({"pp_splits": ["layer.1"]}, "no operator of the model is in a module 'layer.1'; there are table"),
        ({"pp_splits": ["layers.2", "layers.1"]}, "name modules in the order in which they run"),
        ({"pp_splits": ["layers.1", "layers.2"], "schedule": "1f1b"}, "2 ranks take 2 stages, not 3"),
        ({"schedule": "2f2b"}, "there is no schedule '2f2b': use one of 1f1b, dualpipe_v, gpipe"),
        ({"schedule": "inference"}, "the schedule inference is not one of a training step: use 1f1b"),
        ({"schedule": "0: F0.0 B0.0\n1: F1.0 B1.0"}, "the schedule is for 2 ranks and 1 microbatch, the program for pp=2 and 2"),
        ({"schedule": "0: F0.0 F0.1 B0.0 B0.1\n1: F1.0 X1.0 F1.1 B1.1"}, "line 2"),
        ({"schedule": "0: F0.0 F0.1 B0.0 B0.1\n1: B1.0 F1.0 F1.1 B1.1"}, "rank 1, position"),
    ],
)
def test_what_cannot_be_cut_or_scheduled_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises((meshc.PlanError, meshc.ScheduleError), match=said.replace("(", r"\(")):
        compiled(**options)


def test_a_schedule_of_the_users_own() -> None:
    program, inputs = step(schedule="0: F0.0 F0.1 B0.1 B0.0\n1: F1.0 F1.1 B1.1 B1.0  # last in, first out")
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


@pytest.mark.parametrize(
    "mesh, batch, count",
    [("pp=2,tp=2", 4, 1), ("dp=2,pp=2", 7, 3), ("pp=2", 4, None), broad("pp=2", 5, 3), broad("pp=4", 8, 8), broad("dp=2", 5, 2)],
)
def test_inference_in_stages(mesh: str, batch: int, count: int | None) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randint(11, (batch, 6))}
    with torch.no_grad():
        program = meshc.compile(
            Blocks(), meshc.Mesh(mesh), kwargs=inputs, options=meshc.Options(pipeline=meshc.Pipelining(microbatches=count))
        )
    assert meshc.verify(program, inputs, dtype=torch.float64).ok
    assert program.compiled.microbatches == (count or program.compiled.microbatches)


def test_microbatches_are_chosen_by_predicted_time_and_memory() -> None:
    free = compiled(count=None)
    assert free.microbatches in (1, 2, 4)
    times = {}
    for count in (1, 2, 4):
        other = compiled(count=count)
        assert other.pipeline is not None
        times[count] = simulate(other.pipeline.schedule, costs_of(other.pipeline, other.stages, other.mesh)).makespan_s
    assert free.microbatches == min(times, key=lambda count: (times[count], count))


def table(takes: list[float]) -> Numbers:
    """Seconds between any two points of a sequence."""
    before = np.array([0.0, *itertools.accumulate(takes)])
    return before[None, :] - before[:, None]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_within_five_percent_of_the_best(seed: int) -> None:
    chance = random.Random(seed)
    takes = [chance.uniform(0.5, 3) for _ in range(chance.randint(4, 16))]
    sends = np.array([0.0, *(chance.uniform(0, 0.3) for _ in takes[1:]), 0.0])
    stages = chance.randint(2, min(4, len(takes)))
    seconds = table(takes)
    best = min(
        max(seconds[a, b] for a, b in itertools.pairwise((0, *inner, len(takes))))
        for inner in itertools.combinations(range(1, len(takes)), stages - 1)
    )
    found = best_cuts(seconds, sends, stages)
    assert found is not None
    assert best <= found[1] <= best * (1 + SLACK) < best * 1.05
    exact = best_cuts(seconds, sends, stages, slack=0.0)
    assert exact is not None and exact[1] == best
    assert sends[found[0]].sum() <= sends[exact[0]].sum()


@pytest.mark.parametrize("seed", range(20))
def test_cuts_under_a_bound_are_the_best_of_those_that_keep_it(seed: int) -> None:
    """Stages further back hold more microbatches less, as under 1F1B."""
    chance = random.Random(seed)
    count, stages = chance.randint(4, 12), chance.randint(2, 4)
    seconds = table([chance.uniform(0.5, 3) for _ in range(count)])
    holds = table([chance.uniform(0, 3) for _ in range(count)])
    sizes, free = [(stages - stage) * holds for stage in range(stages)], np.zeros(count + 1)
    ways = [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]
    largest = {way: max(sizes[k][a, b] for k, (a, b) in enumerate(itertools.pairwise(way))) for way in ways}
    slowest = {way: max(seconds[a, b] for a, b in itertools.pairwise(way)) for way in ways}
    small = least_cuts(stages, sizes)
    assert small is not None and small[1] == pytest.approx(min(largest.values())) == pytest.approx(largest[(0, *small[0], count)])
    bound = chance.uniform(1.0, 1.6) * small[1] + 1e-9
    found = best_cuts(seconds, free, stages, [size <= bound for size in sizes])
    best = min(slowest[way] for way in ways if largest[way] <= bound)
    assert found is not None and largest[(0, *found[0], count)] <= bound
    assert best <= found[1] <= best * (1 + SLACK)
    assert best_cuts(seconds, free, stages, [size < 0.99 * small[1] for size in sizes]) is None


def test_the_default_schedule_is_the_one_predicted_fastest() -> None:
    program = compiled(count=4)
    assert program.pipeline is not None
    costs = costs_of(program.pipeline, program.stages, program.mesh)
    mine = simulate(program.pipeline.schedule, costs).makespan_s
    for name in SCHEDULES:
        other = compiled(count=4, schedule=name)
        assert other.pipeline is not None
        costs = costs_of(other.pipeline, other.stages, other.mesh)
        assert mine <= simulate(other.pipeline.schedule, costs).makespan_s * 1.1, name


@pytest.mark.parametrize("budget, where", [broad(None, {"before", "start", "after"}), (400_000, {"forward", "backward", "after"})])
def test_stored_parameters_are_gathered_once_a_call_if_memory_allows(budget: int | None, where: set[str]) -> None:
    report = verify("llama", "1f1b", "pp=2,dp_shard=2", memory_budget=budget)
    program = captured("llama").latest
    moved = {
        stage.name.partition("_")[0]
        for stage in program.stages.values()
        for node in stage.graph.nodes
        if node.target in (spmd.all_gather, spmd.reduce_scatter)
    }
    assert report.ok and moved <= where and (budget is None) == ("forward" not in moved)


@pytest.mark.broad
def test_parameters_are_gathered_more_often_if_once_does_not_fit() -> None:
    """Half of the budget would do for them; it is the microbatches that leave too little."""
    case = nanogpt(layers=2, batch=16, seq=32)
    train = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss, microbatches=2)

    def program(budget: int | None) -> meshc.Program:
        options = meshc.Options(pipeline=meshc.Pipelining(schedule="1f1b", splits=["h.1"]), memory_budget=budget, remat="none")
        return meshc.compile(train, meshc.Mesh("pp=2,dp_shard=2"), kwargs=case.call_kwargs, options=options)

    once = program(None).compiled
    often = program(peak_memory.peak_rank(once).total - 1)
    assert gathers(once) == {"before"} and {"forward", "backward"} <= gathers(often.compiled)
    assert peak_memory.peak_rank(often.compiled).total < peak_memory.peak_rank(once).total
    assert meshc.verify(often, case.call_kwargs, dtype=torch.float64).ok


def gathers(program: PlainProgram) -> set[str]:
    """The kinds of stages that gather anything."""
    return {
        name.partition("_")[0]
        for name, stage in program.stages.items()
        if stage.graph.find_nodes(op="call_function", target=spmd.all_gather)
    }


@pytest.mark.parametrize("count", [None, broad(4)])
def test_what_does_not_fit_is_not_chosen(count: int | None) -> None:
    """With a byte less than what the fastest holds, another schedule, number of microbatches or cut is taken, which holds less."""
    free = compiled(count=count)
    budget = peak_memory.peak_rank(free).total - 1
    program, inputs = step(count=count, memory_budget=budget, remat="none")
    tight = program.compiled
    assert free.pipeline is not None and tight.pipeline is not None
    assert peak_memory.peak_rank(tight).total <= budget
    assert (free.microbatches, free.pipeline) != (tight.microbatches, tight.pipeline)
    assert meshc.verify(program, inputs, dtype=torch.float64).ok


@pytest.mark.parametrize(
    "options, said",
    [
        ({"schedule": "gpipe"}, "gpipe with microbatches=2 holds 7,516 on rank 1"),
        broad({}, "zb_v with microbatches=2 holds 5,516 on rank 0"),  # the least of all schedules
        broad({"count": None}, "1f1b with microbatches=4 holds 4,800 on rank "),
        broad({"count": None, "schedule": "gpipe"}, "gpipe with microbatches=4 holds 6,972 on rank 1"),
    ],
)
def test_what_holds_more_than_the_budget_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(meshc.PlanError) as caught:
        compiled(memory_budget=4_000, remat="none", **options)
    message = str(caught.value)
    assert compiled(memory_budget=caught.value.least, remat="none", **options).pipeline is not None  # type: ignore[attr-defined]
    assert f"may hold 4,000 bytes (Options(memory_budget=4000)), but {said}" in message
    assert re.search(r"\n  [\d,]+ are there for the whole call, [\d,]+ are made in it and there at once in [BI]\d\.\d, \w+ at t", message)


class Bottle(nn.Module):
    """A large table and cheap layers, then a few that take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, 16)
        self.cheap = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.dear = nn.ModuleList(nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        for layer in self.cheap:
            h = torch.tanh(layer(h))
        for layer in self.dear:
            h = h + layer(h)
        return h


@pytest.mark.broad
def test_stages_of_equal_time_give_way_to_those_that_fit() -> None:
    """The first stage of two has the table in any case, and of the dear layers as many as the budget allows."""
    torch.manual_seed(0)
    model = Bottle()
    train = meshc.TrainStep(model, optimizer=torch.optim.AdamW(model.parameters()), loss=lambda out, y: F.mse_loss(out, y), microbatches=4)
    inputs = {"x": torch.randint(4000, (8, 32)), "y": torch.randn(8, 32, 16)}

    def program(budget: int | None, **more: object) -> meshc.Program:
        options = meshc.Options(pipeline=meshc.Pipelining(schedule="1f1b"), memory_budget=budget, remat="none", **more)  # type: ignore[arg-type]
        return meshc.compile(train, meshc.Mesh("pp=2"), kwargs=inputs, options=options)

    def first(made: meshc.Program) -> set[str]:
        assert made.compiled.pipeline is not None
        return {key.partition(":")[2].partition(".")[0] for key, rank in made.compiled.pipeline.owners.items() if rank == 0}

    free = program(None)
    needed = peak_memory.peak_rank(free.compiled).total
    assert first(free) == {"table", "cheap", "dear"}
    with pytest.raises(meshc.PlanError, match="holds"):  # cuts that the user has named stay where they are
        program(needed - 1, pp_splits=["dear.1"])
    tight = program(int(0.95 * needed))
    assert first(tight) == {"table", "cheap"} and peak_memory.peak_rank(tight.compiled).total <= 0.95 * needed
    assert meshc.verify(tight, inputs, dtype=torch.float64).ok
    assert first(program(int(0.83 * needed))) == {"table"}


@pytest.mark.broad
def test_a_gpus_memory_counts_where_the_schedule_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is kept from trying what he names himself."""
    monkeypatch.setattr(pipeline_memory, "devices_of", lambda mesh: RankDevices(mesh, replace(device("h100"), memory_bytes=4_000)))
    with pytest.raises(meshc.PlanError, match=r"4,000 bytes \(the device's memory\), but \w+ with microbatches=2 holds 5,"):
        compiled(device="cuda")
    with pytest.raises(meshc.PlanError, match=r"4,000 bytes \(the device's memory\), but gpipe with microbatches=4 holds 6,"):
        compiled(device="cuda", schedule="gpipe", count=None)
    assert compiled(device="cuda", schedule="gpipe").pipeline is not None
    assert compiled().pipeline is not None
