"""MESHC_TRACE in one process: clocks, what is written when, and that nothing is recorded without it. tests/processes has the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import meshc
from meshc import environment
from meshc.pipelining import perfetto_trace
from meshc.pipelining.events import CallTransfer, StageRun, parse_item
from meshc.pipelining.schedule import Action, Message, Recv, Send
from meshc.runtime.comm.groups import Groups
from meshc.runtime.run.executor import Executor
from meshc.runtime.run.recorder import _offset
from tests.cost.test_peak_memory import value
from tests.models import mlp


def test_clocks_are_aligned_by_what_nobody_leaves_before_all_have_entered() -> None:
    """The other clock is 5 s ahead. It is between 5.3 (it left after 10.0) and 4.7 s (it entered before 10.4) by the first round alone."""
    reference, other = [(10.0, 10.4), (11.0, 11.1)], [(15.1, 15.3), (15.9, 16.08)]
    assert _offset(reference[:1], other[:1]) == (pytest.approx(-5.0), pytest.approx(0.3))
    # the second: no less than 11.0 - 16.08, no more than 11.1 - 15.9; of both rounds the narrower ends
    assert _offset(reference, other) == (pytest.approx((-5.08 - 4.8) / 2), pytest.approx(0.14))
    assert _offset(reference, reference) == (0.0, 0.0)


@pytest.mark.parametrize(
    "item",
    [
        StageRun("after_0"), StageRun("each", 3), CallTransfer("SEND", "parameter:h.0.w", 0, 1), CallTransfer("RECV", "sum:g", 3, 12),
        Action("F", 1, 2), Send(Message(Action("F", 0, 1), 1)), Recv(Message(Action("I", 2, 0), 1)),
    ],
    ids=str,
)  # fmt: skip
def test_items_are_read_back(item: Any) -> None:
    assert parse_item(str(item)) == item


def loaded() -> tuple[Executor, dict[str, Any]]:
    """A training step of two microbatches on the only rank."""
    case = mlp()
    step = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss, microbatches=2)
    program = meshc.compile(step, meshc.Mesh("dp=1"), kwargs=case.call_kwargs).compiled
    values = {port.key: value(port, case.call_kwargs) for port in program.inputs if port.kind != "constant"}
    return Executor(program, Groups({"dp": 1}, 0, 1), {"dp": 0}, torch.device("cpu")), values


def test_a_call_is_recorded_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "{call}.json"
    monkeypatch.setenv(environment.TRACE, str(file))
    executor, values = loaded()
    with torch.no_grad():
        executor.run(values)
        executor.run(values)
    assert sorted(path.name for path in file.parent.iterdir()) == ["0.json", "1.json"]
    line = perfetto_trace.trace_to_timeline((tmp_path / "new" / "1.json").read_text())
    assert [str(event.instruction) for event in line.stage_events[0]] == ["RUN:before.0", "RUN:each.0", "RUN:each.1", "RUN:after.0"]
    assert line.name == "step, measured" and line.events[0].start_s == 0
    spans = [(event.start_s, event.end_s) for event in line.stage_events[0]]
    assert all(start < end for start, end in spans) and all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_a_call_that_fails_is_written_as_far_as_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.TRACE, str(tmp_path / "t.json"))
    executor, values = loaded()
    each = executor.stages["each"]

    def fail(inputs: list[Any], microbatch: int, *sums: Any) -> list[Any]:
        if microbatch == 1:
            raise ValueError("on purpose")
        return each.run(inputs, microbatch, *sums)

    executor.stages["each"] = type(each)(each.inputs, each.outputs, fail)
    with torch.no_grad(), pytest.raises(ValueError, match="on purpose"):
        executor.run(values)
    slices = [event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert slices == ["RUN:before.0", "RUN:each.0", "RUN:each.1"]


def test_nothing_is_recorded_if_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.TRACE, raising=False)
    assert loaded()[0].recorder is None
