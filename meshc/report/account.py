"""Accounts of pipeline stages and links: layers, seconds and memory of each stage, traffic of each link in a call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from meshc.cost import peak_memory
from meshc.cost.devices import Given
from meshc.cost.pipeline_costs import costs_of, flow_bytes, saved_bytes
from meshc.ir import calls, records
from meshc.pipelining.activations import activations_in_flight
from meshc.pipelining.pipeline_stages import Pipeline
from meshc.pipelining.timing import Costs
from meshc.program.program import PlainProgram
from meshc.report.tables import bytes_text, seconds_text


@dataclass(frozen=True)
class StageAccount:
    """One stage.

    modules          modules that it runs: `h.0-2`, `lm_head`; a module cut in two is `part of h.3`
    parameter_bytes  bytes of its parameters on its rank
    forward_s, backward_s  predicted seconds for one microbatch; no backward in inference
    saved_bytes      bytes of one microbatch kept from forward until backward
    in_flight        largest number of microbatches between forward and backward at a time
    """

    stage: int
    rank: int
    modules: tuple[str, ...]
    parameter_bytes: int
    forward_s: float
    backward_s: float
    saved_bytes: int
    in_flight: int


@dataclass(frozen=True)
class LinkAccount:
    """Messages and bytes that one rank of the pipeline axis sends to another in a call, without reductions such as the gradient norm."""

    source: int
    target: int
    messages: int
    bytes: int


STAGE_HEADERS: Final = ("stage", "rank", "modules", "parameters", "forward", "backward", "saved x in flight")


def stage_rows(program: PlainProgram, given: Given | None = None) -> list[tuple[str | int, ...]]:
    """A row of STAGE_HEADERS for each stage."""
    return [
        (
            one.stage, one.rank, ", ".join(one.modules), bytes_text(one.parameter_bytes), seconds_text(one.forward_s),
            seconds_text(one.backward_s), f"{bytes_text(one.saved_bytes)} x {one.in_flight}",
        )
        for one in stage_accounts(program, given)
    ]  # fmt: skip


def stage_accounts(program: PlainProgram, given: Given | None = None) -> list[StageAccount]:
    """All stages of a program that has a pipeline, in order."""
    pipeline = _pipeline(program)
    schedule = pipeline.schedule
    costs = costs_of(pipeline, program.stages, program.mesh, given)
    names = _modules(program, schedule.stages)
    kept = saved_bytes(program.stages, schedule.stages)
    found = []
    for stage in range(schedule.stages):
        rank = schedule.rank_of(stage)
        read = set(program.stages[f"forward_{stage}"].inputs)
        here = [port for port in program.inputs if program.owns(port.key, {pipeline.axis: rank})]
        mine = [port for port in here if port.kind == "parameter" and port.key in read]
        actions = [action for action in schedule.actions[rank] if action.stage == stage]
        in_flight = int(max(activations_in_flight(actions), default=0))
        size = sum(peak_memory.port_bytes(port, program.axis_sizes) for port in mine)
        forward, backward = (_seconds(costs, stage, ops) for ops in ("F", "BIW"))
        found.append(StageAccount(stage, rank, tuple(names[stage]), size, forward, backward, kept[stage], in_flight))
    return found


def _seconds(costs: Costs, stage: int, ops: str) -> float:
    """Seconds of these ops; a backward that exists both whole and in halves counts once."""
    present = [op for op in ops if (op, stage) in costs.seconds]
    return sum(costs.seconds[op, stage] for op in (["B"] if "B" in present else present))


def _modules(program: PlainProgram, stages: int) -> list[list[str]]:
    """The modules of each stage, by paths up to the first number: layers of a model are `h.0`, `h.1`, ..."""
    inside: list[dict[str, None]] = []
    for stage in range(stages):
        nodes = calls(program.stages[f"forward_{stage}"].graph)
        inside.append(dict.fromkeys(layer for node in nodes if (layer := _layer(records(node)[0].source.module))))
    often = Counter(name for names in inside for name in names)
    return [list(_ranges(names, {name for name in names if often[name] > 1})) for names in inside]


def _layer(module: str) -> str:
    words = module.split(".")
    number = next((place for place, word in enumerate(words) if word.isdigit()), len(words))
    return ".".join(words[: number + 1])


def _ranges(names: Iterable[str], cut: set[str]) -> Iterator[str]:
    """`h.0, h.1, h.2` as `h.0-2`."""
    run: list[str] = []
    for name in [*names, ""]:
        head, _, number = name.rpartition(".")
        last_head, _, last = run[-1].rpartition(".") if run else ("", "", "")
        if run and name not in cut and number.isdigit() and head == last_head and last.isdigit() and int(number) == int(last) + 1:
            run.append(name)
            continue
        if run:
            yield run[0] if len(run) == 1 else f"{run[0]}-{last}"
        run = [name] if name and name not in cut else []
        if name in cut:
            yield f"part of {name}"


def link_accounts(program: PlainProgram) -> list[LinkAccount]:
    """Accounts of all pairs of ranks that exchange messages, in order."""
    pipeline = _pipeline(program)
    flows, sizes = flow_bytes(program.stages), peak_memory.value_bytes(program)
    sent: dict[tuple[int, int], list[int]] = defaultdict(list)
    for link, keys in pipeline.messages.items():
        pair = pipeline.schedule.rank_of(link.source), pipeline.schedule.rank_of(link.target)
        sent[pair] += [sum(flows[key] for key in keys)] * pipeline.schedule.microbatches
    for move in (*pipeline.shared, *pipeline.returned):
        sent[move.source, move.target].append(sizes[move.key])
    return [LinkAccount(*pair, len(each), sum(each)) for pair, each in sorted(sent.items())]


def _pipeline(program: PlainProgram) -> Pipeline:
    assert program.pipeline is not None, "a program with an axis of pipeline stages"
    return program.pipeline
