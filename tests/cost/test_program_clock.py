"""A program's time: collectives beside computing, schedules, and the line of the summary."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch

import meshc
from meshc.cost import peak_memory
from meshc.cost.devices import Link, Processor, device
from meshc.cost.program_clock import Seconds, program_seconds, stage_seconds
from meshc.cost.stage_clock import Clock
from meshc.errors import CompileError
from meshc.ir import spmd, update
from meshc.ir.mesh import Mesh
from meshc.plan.plan import Plan
from meshc.program.program import Instruction, PlainProgram, Stage
from tests.cost.building import ROUND, Building
from tests.models import mlp

aten = torch.ops.aten
RELU = 8e6 / 1e9 + 1e-6  # of 1000 x 1000 numbers on ROUND
SENT = 4e6 / 1e9 + 1e-5 + 1e-6  # an all-reduce of them by two ranks


def overlapping(reads_early: bool) -> Building:
    """y = relu(x) reduced, while relu(x) is computed again; or first waited for."""
    b = Building()
    x = b.given(1000, 1000)
    first = b.call(aten.relu.default, x, made=(1000, 1000))
    sent = b.call(spmd.all_reduce, first, ["dp"], "sum", made=(1000, 1000))
    second = b.call(aten.relu.default, sent if reads_early else x, made=(1000, 1000))
    b.graph.output([sent, second])
    return b


def test_a_collective_runs_until_it_is_read() -> None:
    one = stage_seconds(overlapping(False).graph, Mesh("dp=2"), ROUND)
    assert one.compute == pytest.approx(2 * RELU) and one.communication == {"dp": pytest.approx(SENT)}
    assert one.total == pytest.approx(2 * RELU) and one.hidden_s == pytest.approx(SENT)
    waiting = stage_seconds(overlapping(True).graph, Mesh("dp=2"), ROUND)
    assert waiting.total == pytest.approx(2 * RELU + SENT) and waiting.hidden_s == pytest.approx(0, abs=1e-12)


def test_a_rank_has_one_link() -> None:
    b = Building()
    x = b.given(1000, 1000)
    sent = [b.call(spmd.all_reduce, x, [axis], "sum", made=(1000, 1000)) for axis in ("dp", "tp")]
    b.graph.output(sent)
    one = stage_seconds(b.graph, Mesh("dp=2,tp=2"), ROUND)
    assert one.communication == {"dp": pytest.approx(SENT), "tp": pytest.approx(SENT)}
    assert one.total == pytest.approx(2 * SENT)


def beside(count: int) -> Building:
    """relu(x) reduced so often, while relu(x) is computed again."""
    b = Building()
    x = b.given(1000, 1000)
    first = b.call(aten.relu.default, x, made=(1000, 1000))
    sent = [b.call(spmd.all_reduce, first, ["dp"], "sum", made=(1000, 1000)) for _ in range(count)]
    b.graph.output([*sent, b.call(aten.relu.default, x, made=(1000, 1000))])
    return b


@pytest.mark.parametrize(
    "contention, count, total",
    [
        # what is on the link for SENT (4.0 ms) takes as much of the 8.0 ms of the relu beside it, or a part, or more
        (0.25, 1, 2 * RELU + 0.25 * SENT),
        (1.0, 1, 2 * RELU + SENT),
        (1.5, 1, 2 * RELU + 1.5 * SENT),
        # what is on it for 12.0 ms is not slowed down by a relu that takes a quarter less of the core, and the rank waits for it
        (0.25, 3, RELU + 3 * SENT),
        # where they are in turns, the relu takes twice its time, in which the link does as much as takes RELU alone, or less
        (1.0, 3, RELU + 2 * RELU + (3 * SENT - RELU)),
        (1.5, 3, RELU + 2 * RELU + (3 * SENT - RELU / 1.5)),
    ],
)
def test_computing_and_communicating_share_cores(contention: float, count: int, total: float) -> None:
    on = replace(ROUND, contention=contention)
    one = stage_seconds(beside(count).graph, Mesh("dp=2"), on)
    assert one.total == pytest.approx(total)
    assert one.compute == pytest.approx(2 * RELU) and one.communication == {"dp": pytest.approx(count * SENT)}
    assert one.hidden_s == pytest.approx(max(0.0, 2 * RELU + count * SENT - total), abs=1e-12)
    # what the rank waits for takes as long as on a link of its own
    alone = stage_seconds(overlapping(True).graph, Mesh("dp=2"), on)
    assert alone.total == pytest.approx(2 * RELU + SENT)


@pytest.mark.parametrize("contention", [0.0, 0.25, 1.0, 1.5])
def test_what_collectives_cost_a_rank_is_told_of_each(contention: float) -> None:
    """Together they are all that is not computing; the first is over before the relu beside it."""
    graph = beside(3).graph
    clock = Clock(contention=contention)
    takes = {node: SENT if node.target is spmd.all_reduce else RELU for node in graph.nodes if node.op == "call_function"}
    for node, seconds in takes.items():
        (clock.exchange if node.target is spmd.all_reduce else clock.compute)(node, seconds)
    clock.await_all()
    assert sum(clock.waited.values()) == pytest.approx(clock.end_s - 2 * RELU)
    first = next(node for node in takes if node.target is spmd.all_reduce)
    assert clock.waited[first] == pytest.approx(contention * SENT)


def test_ranks_wait_for_the_last_where_they_read_what_they_sent() -> None:
    """By the root of what they have computed since they last met; not where something is computed meanwhile that takes longer."""
    on, apart = replace(ROUND, uneven=0.01), 0.01 * sqrt(RELU)
    alone = stage_seconds(overlapping(True).graph, Mesh("dp=2"), on)
    assert alone.total == pytest.approx(2 * RELU + SENT + apart) and alone.communication == {"dp": pytest.approx(SENT)}
    assert stage_seconds(overlapping(False).graph, Mesh("dp=2"), on).total == pytest.approx(2 * RELU)
    b = Building()
    x = b.given(1000, 1000)
    for _ in range(3):  # each relu behind a meeting: as far apart each time, not farther and farther
        x = b.call(spmd.all_reduce, b.call(aten.relu.default, x, made=(1000, 1000)), ["dp"], "sum", made=(1000, 1000))
    twice = b.call(spmd.all_reduce, x, ["dp"], "sum", made=(1000, 1000))  # nothing is computed before it
    b.graph.output([twice])
    clock = Clock(uneven=0.01)
    for node in b.graph.nodes:
        if node.op == "call_function":
            (clock.exchange if node.target is spmd.all_reduce else clock.compute)(node, SENT if node.target is spmd.all_reduce else RELU)
    assert clock.end_s == pytest.approx(3 * (RELU + SENT + apart) + SENT)  # the last is on its way to the end
    clock.await_all()
    assert clock.end_s == pytest.approx(3 * (RELU + SENT + apart) + SENT)
    assert sum(clock.waited.values()) == pytest.approx(3 * (SENT + apart) + SENT)


def test_a_schedule_adds_up() -> None:
    b = Building()
    made = b.call(aten.relu.default, b.given(1000, 1000), made=(1000, 1000))
    b.graph.output([made])
    stages = {"each": Stage("each", b.graph, ("input:x",), ("part:y",))}
    runs = [Instruction("run", "each", index) for index in range(3)]
    adds = [Instruction("add", value="part:y", into="sum:y")] * 3
    schedule = tuple(one for pair in zip(runs, adds, strict=True) for one in pair)
    program = PlainProgram(stages, Mesh("dp=2"), Plan("dp: rows"), (), (), schedule)
    # the first part becomes the sum; the others are read, and the sum read and written
    assert program_seconds(program, ROUND).total == pytest.approx(3 * RELU + 2 * (12e6 / 1e9 + 1e-6))
    program.schedule = (Instruction("leap"),)
    with pytest.raises(CompileError, match="does not know the instruction leap"):
        program_seconds(program, ROUND)


def test_what_starts_within_a_run_slows_it_down() -> None:
    """A sum is reduced beside the rest of the run that has made it; what comes after reads it. In turns nothing is gained."""
    b = Building()
    x = b.given(1000, 1000)
    made = b.call(aten.relu.default, x, made=(1000, 1000))
    b.graph.output([made, b.call(aten.relu.default, x, made=(1000, 1000))])
    s = Building()
    s.graph.output((s.call(spmd.all_reduce, s.given(1000, 1000), ["dp"], "sum", made=(1000, 1000)),))
    a = Building()
    a.graph.output((a.call(aten.relu.default, a.given(1000, 1000), made=(1000, 1000)),))
    stages = {
        "each": Stage("each", b.graph, ("input:x",), ("part:y", "output:z")),
        "start": Stage("start", s.graph, ("sum:y",), ("early:y",)),
        "after": Stage("after", a.graph, ("early:y",), ("output:y",)),
    }
    schedule = (
        Instruction("run", "each"), Instruction("add", value="part:y", into="sum:y"),
        Instruction("start", "start", keys=("sum:y",), during="each"), Instruction("run", "after"),
    )  # fmt: skip
    program = PlainProgram(stages, Mesh("dp=2"), Plan("dp: rows"), (), (), schedule)
    takes = {part: program_seconds(program, replace(ROUND, contention=part)).total for part in (0.0, 0.5, 1.0)}
    assert takes == {part: pytest.approx(3 * RELU + part * SENT) for part in takes}


def test_seconds_add_up_by_axes() -> None:
    total = Seconds(1.0, {"dp": 2.0}, 2.5) + Seconds(1.0, {"dp": 1.0, "tp": 3.0}, 4.0)
    assert total == Seconds(2.0, {"dp": 3.0, "tp": 3.0}, 6.5)


def step(mesh: str, **options) -> meshc.Program:  # type: ignore[no-untyped-def]
    case = mlp()
    made = meshc.TrainStep(case.model, optimizer=torch.optim.AdamW(case.model.parameters()), loss=case.loss, **options)
    return meshc.compile(made, meshc.Mesh(mesh), kwargs=case.call_kwargs)


def test_a_real_program_communicates_over_its_axes() -> None:
    program = step("dp=2,tp=2")
    slow, fast = (program_seconds(program.compiled, device(name)) for name in ("cpu", "h100"))
    assert {"dp", "tp"} <= set(slow.communication) <= {"dp", "tp", "dp, tp"}
    assert 0 < fast.total < slow.total
    assert max(slow.compute, sum(slow.communication.values())) <= slow.total <= slow.compute + sum(slow.communication.values())
    told = program.summary()
    assert "predicted time of a call (cpu: chosen for one core of a server" in told
    assert "communicating over tp" in told and "communicating over dp" in told


def test_one_rank_does_not_communicate() -> None:
    takes = program_seconds(step("dp=1").compiled, device("cpu"))
    assert takes.communication == {} and takes.total == pytest.approx(takes.compute)


def test_microbatches_are_run_one_after_another() -> None:
    one, two = (program_seconds(step("dp=2", microbatches=count).compiled, ROUND) for count in (1, 3))
    assert two.compute > 1.5 * one.compute  # a microbatch as small as these costs its operators' overhead


def test_memory_of_a_rank_is_what_the_summary_adds_up() -> None:
    program = step("dp=2").compiled
    kept = sum(peak_memory.port_bytes(port, {"dp": 2}) for port in program.inputs if port.kind in peak_memory.KEPT)
    assert peak_memory.peak_rank(program).total == kept + peak_memory.peak(program).total > kept


def test_what_runs_on_the_host_has_a_lane_there() -> None:
    """x leaves (5 ms), while the device computes; on the host relu(x) takes 8 MB at 0.8 * 2 GB/s and 1 ms of overhead; then it comes back.
    What stands before the host's operator goes on meanwhile, what stands behind it is not begun before it is done."""
    b = Building()
    x = b.given(1000, 1000)
    out = b.call(spmd.to_host, x, made=(1000, 1000))
    before = [b.call(aten.relu.default, x, made=(1000, 1000)) for _ in range(3)]
    update(out, storage="host")
    there = b.call(aten.relu.default, out, made=(1000, 1000))
    update(there, storage="host")
    back = b.call(spmd.from_host, there, made=(1000, 1000))
    behind = b.call(aten.relu.default, x, made=(1000, 1000))
    b.graph.output([*before, back, behind])
    linked = replace(ROUND, host=Link(1e-3, 1e9), processor=Processor(2e9, 1e12, 1e-3))
    copied, on_host = 4e-3 + 1e-3, 8e6 / (0.8 * 2e9) + 1e-3
    one = stage_seconds(b.graph, Mesh("dp=2"), linked)
    assert one.there == pytest.approx(on_host) and one.compute == pytest.approx(4 * RELU)
    assert 3 * RELU > copied + on_host  # so the host is done while the device has still what it was handed before
    assert one.total == pytest.approx(3 * RELU + max(RELU, copied))
    slow = replace(linked, processor=Processor(0.2e9, 1e12, 1e-3))
    late = copied + 8e6 / (0.8 * 0.2e9) + 1e-3
    assert stage_seconds(b.graph, Mesh("dp=2"), slow).total == pytest.approx(late + max(RELU, copied))
    itself = stage_seconds(b.graph, Mesh("dp=2"), ROUND)  # a device that is the host computes all, copies too
    assert itself.there == 0 and itself.compute == pytest.approx(5 * RELU)


def test_copies_to_the_host_go_beside_computing_each_way_in_a_lane_of_its_own() -> None:
    """Two products' results leave while the next is computed; the first comes back while the second leaves. 4 MB at 1 GB/s are 4 ms."""
    b = Building()
    x = b.given(1000, 1000)
    first = b.call(aten.relu.default, x, made=(1000, 1000))
    there = b.call(spmd.to_host, first, made=(1000, 1000))
    second = b.call(aten.relu.default, x, made=(1000, 1000))
    also = b.call(spmd.to_host, second, made=(1000, 1000))
    back = b.call(spmd.from_host, there, made=(1000, 1000))
    third = b.call(aten.relu.default, back, made=(1000, 1000))
    b.graph.output([third, also])
    copied = 4e-3 + 1e-3
    linked = replace(ROUND, host=Link(1e-3, 1e9))
    one = stage_seconds(b.graph, Mesh("dp=2"), linked)
    assert one.communication == {"host": pytest.approx(3 * copied)} and one.compute == pytest.approx(3 * RELU)
    left = max(RELU + copied, 2 * RELU)  # the first is there once it has been copied and the second is computed
    assert one.total == pytest.approx(max(left + copied + RELU, 2 * RELU + copied))
    itself = stage_seconds(b.graph, Mesh("dp=2"), ROUND)  # whose host is the device: it copies in its memory, and waits for that
    assert itself.total == pytest.approx(3 * RELU + 3 * RELU) and itself.hidden_s == 0
