"""What a call is predicted to look like: a program of two stages whose timeline and memory can be worked out by hand, and what is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx import Node

import meshc
from meshc import artifact
from meshc.cost import call_timeline, peak_memory
from meshc.cost.links import collective_seconds
from meshc.cost.program_clock import program_seconds
from meshc.errors import PlanError
from meshc.ir import spmd
from meshc.ir.mesh import Mesh
from meshc.passes.stages.schedules import build
from meshc.pipelining import draw, perfetto_trace
from meshc.pipelining.pipeline_stages import Move, Pipeline, Start
from meshc.pipelining.schedule import Action, StageLink
from meshc.plan.plan import Plan
from meshc.program.program import PlainProgram, Port, Stage
from meshc.report import summary
from meshc.report.account import link_accounts, stage_accounts
from tests.cost.building import ROUND, Building
from tests.models import Case, nanogpt
from tests.report.test_summary import cell

aten = torch.ops.aten
MB = 4_000_000  # of each value, 1000 x 1000 numbers
R = 8e6 / 1e9 + 1e-6  # a relu of them on ROUND
S = 4e6 / 1e9 + 1e-5  # a message
A = (12e6 / 1e9 + 1e-6) / 2  # adding one to a sum, which of two microbatches the second does
T = 4e6 / 1e9 + 1e-5 + 1e-6  # an all-reduce by two ranks


def stage(name: str, reads: tuple[str, ...], gives: tuple[str, ...], meet: bool = False) -> Stage:
    """One relu of the first input, given under each key."""
    b = Building()
    given = [b.given(1000, 1000) for _ in reads]
    made: Node = b.call(aten.add.Tensor if len(reads) > 1 else aten.relu.default, *given[:2], made=(1000, 1000))
    if meet:
        made = b.call(spmd.all_reduce, made, ["pp"], "sum", made=(1000, 1000))
    b.graph.output(tuple(made for _ in gives))
    return Stage(name, b.graph, reads, gives)


def by_hand() -> PlainProgram:
    stages = [
        stage("before_0", ("input:x",), ("value:x",)),
        stage("forward_0", ("value:x",), ("flow:h",)),
        stage("forward_1", ("flow:h",), ("flow:y",)),
        stage("backward_1", ("flow:y",), ("flow:g", "part:w")),
        stage("backward_0", ("flow:g",), ("part:v",)),
        stage("after_0", ("sum:v",), ("parameter:v",), meet=True),
        stage("after_1", ("sum:w",), ("parameter:w",), meet=True),
    ]
    links = {StageLink("F", 0, 1): ("flow:h",), StageLink("B", 1, 0): ("flow:g",)}
    schedule = build("gpipe", 2, 2, links=tuple(links))
    ports = (Port("input", "x", (1000, 1000), torch.float32), *(Port("parameter", name, (1000, 1000), torch.float32) for name in "vw"))
    pipeline = Pipeline("pp", schedule, links, {"parameter:v": 0, "parameter:w": 1})
    named = {one.name: one for one in stages}
    return PlainProgram(
        named, Mesh("pp=2"), Plan(""), ports, ports[1:], microbatches=2, mode="step", axis_sizes={"pp": 2}, pipeline=pipeline
    )


def test_a_timeline_by_hand() -> None:
    """rank 0  before F0.0 F0.1                                   B0.0 B0.1 after
    rank 1                   F1.0 F1.1  B1.0  B1.1                         after"""
    line = call_timeline.predict_timeline(by_hand(), ROUND)
    spans = {(event.rank, str(event.instruction)): (event.start_s, event.end_s) for event in line.events}
    late = 7 * R + 2 * S + 3 * A
    wanted = {
        (0, "RUN:before_0.0"): (0, R),
        (0, "F0.0"): (R, 2 * R),
        (0, "F0.1"): (2 * R, 3 * R),
        (0, "SEND:F0.0>1"): (2 * R, 2 * R + S),
        (1, "F1.0"): (2 * R + S, 3 * R + S),
        (0, "SEND:F0.1>1"): (3 * R, 3 * R + S),
        (1, "F1.1"): (3 * R + S, 4 * R + S),
        (1, "B1.0"): (4 * R + S, 5 * R + S + A),
        (1, "B1.1"): (5 * R + S + A, 6 * R + S + 2 * A),
        (1, "SEND:B1.1>0"): (6 * R + S + 2 * A, 6 * R + 2 * S + 2 * A),
        (0, "B0.0"): (5 * R + 2 * S + A, 6 * R + 2 * S + 2 * A),
        (0, "B0.1"): (6 * R + 2 * S + 2 * A, late),
        (0, "RUN:after_0.0"): (late, late + R + T),
        (1, "RUN:after_1.0"): (late, late + R + T),
    }
    for what, span in wanted.items():
        assert spans[what] == (pytest.approx(span[0]), pytest.approx(span[1])), what
    assert line.makespan_s == pytest.approx(late - R)
    assert line.call_s == pytest.approx(late + R + T)
    busy = [4 * R + 2 * A, 4 * R + 2 * A]
    assert line.idle_s == (pytest.approx(line.makespan_s - busy[0]), pytest.approx(line.makespan_s - busy[1]))


def test_seconds_of_a_pipeline_are_those_of_its_timeline() -> None:
    takes = program_seconds(by_hand(), ROUND)
    assert takes.total == pytest.approx(8 * R + 2 * S + 3 * A + T)
    # the rank with the stage before, one of its sums, and its own stage after
    assert takes.compute == pytest.approx(6 * R + 2 * A) and takes.communication == {"pp": pytest.approx(T)}
    assert takes.idle == pytest.approx(takes.total - takes.compute - T) and takes.hidden_s == pytest.approx(0, abs=1e-12)


def test_what_is_handed_over_once_a_call() -> None:
    """A parameter comes before the rank that reads it begins; the sum of its gradient goes back before the update."""
    program = by_hand()
    assert program.pipeline is not None
    pipeline = program.pipeline
    program.pipeline = Pipeline(
        "pp", pipeline.schedule, pipeline.messages, pipeline.owners, (Move("parameter:v", 0, 1),), (Move("sum:w", 1, 0),)
    )
    line = call_timeline.predict_timeline(program, ROUND)
    spans = {(event.rank, str(event.instruction)): (event.start_s, event.end_s) for event in line.events}
    assert spans[0, "SEND:parameter:v@0>1"] == spans[1, "RECV:parameter:v@0>1"] == (0, pytest.approx(S))
    late = spans[0, "B0.1"][1]
    assert spans[1, "SEND:sum:w@1>0"] == (pytest.approx(late), pytest.approx(late + S))  # when rank 0 has posted its receive
    assert spans[0, "RUN:after_0.0"][0] == spans[1, "RUN:after_1.0"][0] == pytest.approx(late + S)
    assert [(one.source, one.target, one.messages, one.bytes) for one in link_accounts(program)] == [(0, 1, 3, 3 * MB), (1, 0, 3, 3 * MB)]


def test_what_starts_within_a_microbatch_is_on_its_way_beside_it() -> None:
    """The reduction of sum:w begins when B1.1 has made it, and has all of rank 0's backward to arrive; that of sum:v has none."""
    program = by_hand()
    assert program.pipeline is not None
    plain = call_timeline.predict_timeline(program, ROUND).call_s
    for rank, name in enumerate("vw"):
        b = Building()
        b.graph.output((b.call(spmd.all_reduce, b.given(1000, 1000), ["dp"], "sum", made=(1000, 1000)),))
        program.stages[f"start_{rank}"] = Stage(f"start_{rank}", b.graph, (f"sum:{name}",), (f"early:{name}",))
        program.stages[f"after_{rank}"] = stage(f"after_{rank}", (f"early:{name}",), (f"parameter:{name}",))
    program.mesh = Mesh("pp=2,dp=2")
    starts = (Start("start_0", ("sum:v",), Action("B", 0, 1)), Start("start_1", ("sum:w",), Action("B", 1, 1)))
    program.pipeline = replace(program.pipeline, starts=starts)
    line = call_timeline.predict_timeline(program, ROUND)
    spans = {(event.rank, str(event.instruction)): (event.start_s, event.end_s) for event in line.events}
    (start,) = program.stages["start_0"].graph.find_nodes(op="call_function", target=spmd.all_reduce)
    reduced = collective_seconds(start, program.mesh, ROUND)
    begun = {rank: spans[rank, f"B{rank}.1"][0] + R for rank in (0, 1)}
    for rank in (0, 1):
        begin, end = spans[rank, f"RUN:after_{rank}.0"]
        assert begin == pytest.approx(spans[rank, f"B{rank}.1"][1])
        assert end == pytest.approx(max(begin, begun[rank] + reduced) + R)
    assert line.call_s < plain + reduced
    assert peak_memory.runs(program)["start_0"] == 1


def test_memory_by_hand() -> None:
    zero, one = peak_memory.by_rank(by_hand())
    assert (zero.rank, one.rank) == (0, 1)
    assert dict(zero.kept) == dict(one.kept) == {"input": MB, "parameter": MB}
    # x; both gradients that come, since receives are posted early; and what B0.0 makes of the first
    assert zero.peak.total == 4 * MB and zero.peak.at.endswith("stage backward_0")
    # both activations that come, and what F1.0 makes of the first; or y of both microbatches, and what B1.0 makes
    assert one.peak.total == 3 * MB
    assert peak_memory.peak_rank(by_hand()) == zero and peak_memory.peak(by_hand()) == zero.peak


def test_stages_and_links() -> None:
    first, second = stage_accounts(by_hand(), ROUND)
    assert (first.forward_s, first.backward_s, second.backward_s) == (pytest.approx(R), pytest.approx(R + A), pytest.approx(R + A))
    assert (first.saved_bytes, second.saved_bytes, second.in_flight) == (0, MB, 2)
    assert [(one.source, one.target, one.messages, one.bytes) for one in link_accounts(by_hand())] == [(0, 1, 2, 2 * MB), (1, 0, 2, 2 * MB)]


def step(case: Case, mesh: str, **options: object) -> meshc.Program:
    train = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss, microbatches=2)
    return meshc.compile(train, meshc.Mesh(mesh), kwargs=case.call_kwargs, options=meshc.Options(**options))  # type: ignore[arg-type]


def test_a_summary_prices_for_any_device_of_the_table() -> None:
    told = {name: summary.summary(by_hand(), name) for name in ("a100", "h100", "h200", "b200", "cpu")}
    assert all(f"predicted time of a call ({name}: " in text for name, text in told.items())
    assert len({text.partition("predicted time of a call")[2].partition("\n")[2] for text in told.values()}) == len(told)
    assert len({cell(text, "0        0", "forward") for text in told.values()}) > 1, "stages are priced for it too"
    with pytest.raises(PlanError, match="device 'z80'; there are .*b200"):
        summary.summary(by_hand(), "z80")


@pytest.mark.broad
def test_the_summary_tells_of_stages(tmp_path: Path) -> None:
    program = step(nanogpt(layers=4, batch=8), "pp=2,dp=2", schedule="1f1b", pp_splits=["h.2"])
    told = program.summary()
    assert "pipeline over pp, schedule 1f1b: 2 microbatches, " in told and "% bubble predicted" in told
    assert cell(told, "0        0", "modules") == "wte, wpe, drop, h.0-1"
    assert cell(told, "1        1", "modules") == "h.2-3, ln_f, lm_head"
    assert cell(told, "0        0", "saved x in flight").endswith(" x 2") and cell(told, "1        1", "saved x in flight").endswith(" x 1")
    assert cell(told, "h.*.mlp.0.weight", "rank of pp") == "0, 1"
    assert cell(told, "h.*.mlp.0.weight", "bytes/rank") == f"{2 * 128 * 32 * 4 / 1000:.1f} kB"
    assert cell(told, "wte.weight", "rank of pp") == "0"
    parameters = [4 * sum(p.numel() for n, p in nanogpt(layers=4, batch=8).model.named_parameters() if part(n) == rank) for rank in (0, 1)]
    assert [cell(told, f"{rank}        {rank}", "parameters") for rank in (0, 1)] == [f"{size / 1000:.1f} kB" for size in parameters]
    assert "memory of rank 0 of pp, which needs most" in told
    assert cell(told, "parameters", "bytes/rank") == f"{parameters[0] / 1000:.1f} kB"
    assert "waiting for other stages" in told
    assert "all ranks together do 1.00 times that" in told
    # two activations of 8 / 2 / 2 rows of 12 tokens, and the head's weight, which is the embedding's
    assert cell(told, "0 to 1", "messages") == "3"
    assert cell(told, "0 to 1", "bytes") == f"{(2 * 2 * 12 * 32 * 4 + 65 * 32 * 4) / 1000:.1f} kB"


@pytest.mark.broad
def test_equal_layers_are_cut_into_equal_stages() -> None:
    """Attention's backward has no number that says which forward it belongs to; it counts with what it reads."""
    first, second = stage_accounts(step(nanogpt(layers=8, hidden=128, batch=8, seq=64), "pp=2", schedule="1f1b").compiled)
    assert first.forward_s + first.backward_s == pytest.approx(second.forward_s + second.backward_s, rel=0.05)
    assert (first.modules, second.modules) == (("wte", "wpe", "drop", "h.0-3"), ("h.4-7", "ln_f", "lm_head"))


def part(name: str) -> int:
    return int(name.startswith(("h.2", "h.3", "ln_f")))


def test_timelines_are_written_as_asked(tmp_path: Path) -> None:
    program = step(nanogpt(layers=1), "pp=2", schedule="1f1b")
    line = program.timeline(tmp_path / "out")
    assert line.name == "1f1b, predicted" and line.ranks == 2 and line.call_s > line.makespan_s > 0
    assert (tmp_path / "out" / "timeline.svg").read_text() == draw.svg(line)
    again = perfetto_trace.trace_to_timeline((tmp_path / "out" / "timeline.json").read_text())
    assert sorted(str(event.instruction) for event in again.events) == sorted(str(event.instruction) for event in line.events)
    assert again.call_s == pytest.approx(line.call_s, abs=1e-8)
    program.timeline(tmp_path / "one.svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.svg", "out"]
    with pytest.raises(PlanError, match="a timeline is written as .svg or .json"):
        program.timeline(tmp_path / "one.png")


def test_a_program_without_a_pipeline_has_one_row(tmp_path: Path) -> None:
    program = step(nanogpt(layers=1), "dp=2")
    line = program.timeline(tmp_path / "t.json")
    assert [str(event.instruction) for event in line.events] == ["RUN:before.0", "RUN:each.0", "RUN:each.1", "RUN:after.0"]
    assert line.call_s == pytest.approx(program_seconds(program.compiled).total)
    slices = [event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert slices == [str(event.instruction) for event in line.events]
    assert "after on rank 0" in draw.svg(line)


def test_an_inference_and_its_saved_program_look_alike(tmp_path: Path) -> None:
    case = nanogpt(batch=8)
    with torch.no_grad():
        options = meshc.Options(pipeline=meshc.Pipelining(schedule="inference", splits=["h.1"], microbatches=2))
        program = meshc.compile(case.model, meshc.Mesh("pp=2"), kwargs=case.kwargs, options=options)
    line = program.timeline()
    assert {str(event.instruction) for row in line.action_events for event in row} == {"F0.0", "F0.1", "F1.0", "F1.1"}
    told = program.summary()
    assert "schedule inference: 2 microbatches" in told and "backward" not in told
    assert cell(told, "1        1", "modules") == "h.1, ln_f, lm_head"
    program.save(tmp_path / "m", weights=False)
    again = artifact.load(tmp_path / "m")
    assert draw.svg(call_timeline.predict_timeline(again)) == draw.svg(line) and peak_memory.by_rank(again) == peak_memory.by_rank(
        program.compiled
    )
