"""MESHC_TRACE on real ranks: what is recorded, in what order, and that the clocks agree; and what each rank of a pipeline holds."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshc
from meshc.cost import peak_memory
from meshc.ir import is_getitem, runs_on_host, spmd
from meshc.optimizer.optimizer import numbers
from meshc.pipelining import draw, perfetto_trace
from meshc.pipelining.events import Item, StageRun
from meshc.pipelining.schedule import Action, Recv, Send
from meshc.pipelining.timing import Event, Timeline
from meshc.program.rank_instructions import items_of
from meshc.report.account import link_accounts
from tests.cost.test_peak_memory import Live
from tests.models import nanogpt
from tests.processes.session import device_mesh, run_checks

MICROBATCHES = 4


def folder() -> Path:
    return Path(os.environ["MESHC_TRACE"]).parent


@functools.cache
def made(mesh: Any, layers: int = 2, **options: Any) -> tuple[meshc.Program, dict[str, Any]]:
    """One program for all checks that ask for the same."""
    case = nanogpt(layers=layers, batch=8)
    step = meshc.TrainStep(
        case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss, microbatches=MICROBATCHES, clip_grad_norm=1.0
    )
    return meshc.compile(step, mesh, kwargs=case.call_kwargs, options=meshc.Options(**options)), case.call_kwargs


def read(call: int) -> tuple[Timeline, dict[str, Any]]:
    text = (folder() / f"trace_{call}.json").read_text()
    return perfetto_trace.trace_to_timeline(text), json.loads(text)["otherData"]


def computed(line: Timeline, rank: int) -> list[Item]:
    return [event.instruction for event in line.stage_events[rank]]


def pipeline(mesh: Any) -> None:
    """Calls 0 and 1: every instruction of every rank is there, in the order of its list, and messages arrive after they were sent."""
    program, inputs = made(mesh, schedule="1f1b")
    program(**inputs)
    program(**inputs)
    if dist.get_rank() == 0:
        for call in (0, 1):
            line, about = read(call)
            assert line.name == "1f1b, measured" and line.ranks == 2 and line.pipelines == ((0, 1),)
            accuracy_s = [float(about["clocks are right to"][str(rank)].removesuffix(" us")) / 1e6 for rank in (0, 1)]
            assert accuracy_s[0] == 0 and 0 < accuracy_s[1] < 0.1
            for rank in (0, 1):
                items = [item for item in items_of(program.compiled, {"pp": rank}) if item is not None]
                mine = [event for event in line.events if event.rank == rank]
                assert sorted(map(str, (event.instruction for event in mine))) == sorted(map(str, items))
                assert computed(line, rank) == [item for item in items if isinstance(item, (Action, StageRun))]
                posted = sorted((event for event in mine if isinstance(event.instruction, Send)), key=lambda event: event.start_s)
                assert [event.instruction for event in posted] == [item for item in items if isinstance(item, Send)]
                in_turn = line.stage_events[rank]
                assert all(a.end_s <= b.start_s + 1e-9 for a, b in zip(in_turn, in_turn[1:], strict=False))
            arrives(line, sum(accuracy_s))
            assert "B1.3 on rank 1" in draw.svg(line)


def arrives(line: Timeline, tolerance_s: float) -> None:
    sent = {event.instruction.message: event for event in line.events if isinstance(event.instruction, Send)}
    came = {event.instruction.message: event for event in line.events if isinstance(event.instruction, Recv)}
    assert sent.keys() == came.keys() and len(sent) == 2 * MICROBATCHES
    users: dict[Any, Event] = {event.instruction: event for row in line.action_events for event in row}
    for message, event in came.items():
        assert event.end_s >= sent[message].start_s - tolerance_s, message
        (user,) = (users[action] for action in message.users if action in users)
        assert event.end_s <= user.start_s + 1e-6, message  # on one rank's clock: it starts once that has come
        assert user.start_s >= users[message.of].end_s - tolerance_s, message


def no_pipeline(mesh: Any) -> None:
    """Call 2: a program without stages has the stages of its microbatches on each rank."""
    program, inputs = made(device_mesh("dp=2"))
    program(**inputs)
    if dist.get_rank() == 0:
        line, _ = read(2)
        wanted = [StageRun("before"), *(StageRun("each", k) for k in range(MICROBATCHES)), StageRun("after")]
        assert computed(line, 0) == computed(line, 1) == wanted


def module(mesh: Any) -> None:
    """Calls 3 and 4: forward and backward of a module are calls of their own."""
    case = nanogpt()
    program = meshc.compile(case.model, device_mesh("dp=2"), kwargs=case.kwargs)
    case.loss_of(program(**case.kwargs)).backward()
    if dist.get_rank() == 0:
        assert computed(read(3)[0], 1) == [StageRun("forward")] and computed(read(4)[0], 1) == [StageRun("backward")]


def copies(mesh: Any) -> None:
    """Call 5: gradients leave while backward runs, an update runs on the host once its gradient is there, its parameter comes back behind
    it. A rank of CPUs does all of it itself: within the stage, one after another."""
    program, inputs = offloaded(device_mesh("dp=2"))
    program(**inputs)
    if dist.get_rank() == 0:
        line, _ = read(5)
        stage = program.compiled.stage.graph
        for rank in (0, 1):
            (run,) = line.stage_events[rank]
            mine = sorted((event for event in line.events if event.rank == rank and event is not run), key=lambda event: event.start_s)
            assert all(run.start_s <= event.start_s <= event.end_s <= run.end_s for event in mine)
            assert all(one.end_s <= next.start_s + 1e-9 for one, next in zip(mine, mine[1:], strict=False))
            names = [str(event.instruction) for event in mine]
            ops = {spmd.to_host: "OUT", spmd.from_host: "IN"}
            wanted = [
                f"{ops.get(node.target, 'HOST')}:main.{node.name}" for node in stage.nodes
                if spmd.is_host_copy(node.target) or (runs_on_host(node) and not is_getitem(node))
            ]  # fmt: skip
            assert names == wanted and {name.partition(":")[0] for name in names} == {"OUT", "IN", "HOST"}
            updates = [place for place, name in enumerate(names) if "sgd" in name]
            assert len(updates) > 1  # windows: a later gradient leaves behind the first update
            assert any(name.startswith("OUT") for name in names[updates[0] : updates[-1]])
            assert perfetto_trace.trace_to_timeline(
                perfetto_trace.timeline_to_trace(line)
            ).events and "to the host" in perfetto_trace.timeline_to_trace(line)


def offloaded(mesh: Any) -> tuple[meshc.Program, dict[str, Any]]:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = meshc.TrainStep(model, optimizer=optimizer, loss=torch.nn.functional.mse_loss)
    inputs = {"input": torch.randn(4, 512), "target": torch.randn(4, 512)}
    return meshc.compile(step, mesh, plan="offload state, update", kwargs=inputs), inputs


def failure(mesh: Any) -> None:
    """Call 7 fails on rank 1 in its second backward: what both have recorded is written."""
    program, inputs = made(mesh, schedule="1f1b")
    session = program.compilations.last.session
    assert session is not None
    if dist.get_rank() == 1:
        stage = session.executor.stages["backward_1"]
        ran = []

        def fail(*arguments: Any) -> Any:
            ran.append(1)
            if len(ran) == 2:
                raise ValueError("on purpose")
            return run(*arguments)

        run = stage.run
        session.executor.stages["backward_1"] = type(stage)(stage.inputs, stage.outputs, fail)
        with pytest.raises(ValueError, match="on purpose"):
            program(**inputs)
        return
    with pytest.raises(meshc.PeerError, match="on purpose"):
        program(**inputs)
    line, _ = read(7)
    assert [str(item) for item in computed(line, 1) if isinstance(item, Action)] == ["F1.0", "B1.0", "F1.1", "B1.1"]
    assert "F0.0" in map(str, computed(line, 0))


def memory_of_ranks(mesh: Any) -> None:
    """What each rank is predicted to hold is what it holds. gloo does not say that a message has left: these stay until the update."""
    program, inputs = made(mesh, layers=4, schedule="zb_v")
    session = program.compilations.last.session
    assert session is not None and program.step is not None
    given = {f"{index}.{name}": value for index, row in enumerate(numbers(program.step.optimizer)) for name, value in row.items()}
    values = session.values([tensor for tensor in inputs.values() if isinstance(tensor, torch.Tensor)], given)
    with Live([value for value in values.values() if isinstance(value, torch.Tensor)]) as live, torch.no_grad():
        session.executor.run(values, 1)
    rank = dist.get_rank()
    predicted = peak_memory.by_rank(program.compiled)[rank].peak.total
    sent = sum(link.bytes for link in link_accounts(program.compiled) if link.source == rank)
    assert predicted <= live.peak <= predicted + sent < 1.15 * predicted, (predicted, live.peak, sent)


def run(mesh: str, *names: str) -> None:
    run_checks([pipeline, no_pipeline, module, copies, memory_of_ranks, failure], mesh, names)
