"""Ranks with devices of two kinds: what is priced by rank, and what ranks that wait for each other take."""

from __future__ import annotations

from dataclasses import replace

import pytest

import meshc
from meshc.cost import peak_memory
from meshc.cost.call_timeline import predict_timeline
from meshc.cost.devices import Device, Link, assume_device, device, devices_of
from meshc.cost.links import pair_link
from meshc.cost.program_clock import program_seconds
from meshc.cost.stage_clock import stage_seconds
from meshc.ir.mesh import Mesh
from meshc.passes.driver.budget_changes import ChangeTrials, FittingChanges
from meshc.report.account import stage_accounts
from meshc.report.figures import figures
from meshc.report.page import head
from meshc.report.summary import summary
from tests.cost.building import ROUND
from tests.cost.test_program_clock import RELU, SENT, overlapping, step
from tests.pipelining.test_call import by_hand
from tests.pipelining.test_stages import compiled

SLOW = replace(
    ROUND, name="slow", source="planted", memory_Bps=1e9, memory_bytes=5e8,
    flops_per_s={of: one / 2 for of, one in ROUND.flops_per_s.items()}, inside_node=Link(2e-5, 5e8), between_nodes=Link(2e-4, 5e7),
)  # fmt: skip
"""Half of everything."""
BOTH = {0: ROUND, 1: SLOW}
SLOW_RELU = 8e6 / 5e8 + 1e-6
SLOW_SENT = 4e6 / 5e8 + 2e-5 + 1e-6


def test_a_rank_has_a_device() -> None:
    mixed = devices_of(Mesh("dp=2,pp=2"), {0: ROUND, 1: SLOW, 2: ROUND, 3: SLOW})
    assert mixed.of(2) == ROUND and mixed.of(3) == SLOW and mixed.kinds() == [ROUND, SLOW]
    assert mixed.slowest({"pp": 0}) is ROUND and mixed.slowest({"pp": 1}) is SLOW
    assert mixed.slowest({"dp": 1}).name == "round and slow" and mixed.slowest({"dp": 1}).source == "; planted"
    assert mixed.least_memory({"pp": 0}) == 1e9 and mixed.least_memory() == 5e8
    alike = devices_of(Mesh("dp=2,pp=2"), ROUND)
    assert alike.slowest() is alike.slowest({"pp": 1}) is alike.of(3) is ROUND
    with assume_device(BOTH):
        assert devices_of(Mesh("pp=2")).of(1) is SLOW and devices_of(Mesh("pp=2"), "h100").of(1) == device("h100")


def test_ranks_that_run_one_program_wait_for_the_slowest_in_each_figure() -> None:
    """One is slow in memory, the other on the link: a step computes as the first and exchanges as the other."""
    memory, link = replace(ROUND, memory_Bps=1e9), replace(ROUND, inside_node=Link(2e-5, 5e8))
    on = devices_of(Mesh("dp=2"), {0: memory, 1: link}).slowest()
    assert stage_seconds(overlapping(True).graph, Mesh("dp=2"), on).total == pytest.approx(2 * SLOW_RELU + SLOW_SENT)
    assert stage_seconds(overlapping(True).graph, Mesh("dp=2"), ROUND).total == pytest.approx(2 * RELU + SENT)


@pytest.mark.parametrize("one", [SLOW, device("h100"), device("a100"), device("cpu")], ids=lambda one: one.name)
def test_what_is_slower_in_everything_is_what_counts(one: Device) -> None:
    """Beside a device that is twice as fast in all, whatever of its peaks programs get."""
    eased = replace(one.efficiency, flops=one.efficiency.flops / 4, memory=one.efficiency.memory / 4, links=one.efficiency.links / 4)
    fast = replace(
        one, name="fast", efficiency=eased, memory_Bps=8 * one.memory_Bps,
        flops_per_s={of: 8 * rate for of, rate in one.flops_per_s.items()},
        inside_node=replace(one.inside_node, bandwidth_Bps=8 * one.inside_node.bandwidth_Bps),
        between_nodes=replace(one.between_nodes, bandwidth_Bps=8 * one.between_nodes.bandwidth_Bps),
        host=one.host and replace(one.host, bandwidth_Bps=8 * one.host.bandwidth_Bps),
    )  # fmt: skip
    program = step("dp=2").compiled
    slow_s, mixed_s = program_seconds(program, one).total, program_seconds(program, {0: fast, 1: one}).total
    assert mixed_s == pytest.approx(slow_s) and program_seconds(program, fast).total < slow_s


def test_stages_are_priced_by_their_ranks() -> None:
    """A message goes as fast as the slower of its ends."""
    first, second = stage_accounts(by_hand(), BOTH)
    assert first == stage_accounts(by_hand(), ROUND)[0] and second == stage_accounts(by_hand(), SLOW)[1]
    assert (first.forward_s, second.forward_s) == (pytest.approx(RELU), pytest.approx(SLOW_RELU))
    assert pair_link(devices_of(Mesh("pp=2"), BOTH), "pp", 0, 1) == SLOW.inside_node
    message_s = 4e6 / 5e8 + 2e-5
    spans = {(event.rank, str(event.instruction)): (event.start_s, event.end_s) for event in predict_timeline(by_hand(), BOTH).events}
    assert spans[0, "F0.0"] == (pytest.approx(RELU), pytest.approx(2 * RELU))
    assert spans[0, "SEND:F0.0>1"] == (pytest.approx(2 * RELU), pytest.approx(2 * RELU + message_s))
    assert spans[1, "F1.0"] == (pytest.approx(2 * RELU + message_s), pytest.approx(2 * RELU + message_s + SLOW_RELU))
    fast_s, mixed_s, slow_s = (program_seconds(by_hand(), on).total for on in (ROUND, BOTH, SLOW))
    add_s, slow_add_s = (0.5 * (1e-6 + 12e6 / rate) for rate in (1e9, 5e8))  # half: the first of two microbatches has nothing to add to
    late = 2 * RELU + message_s + 4 * SLOW_RELU + 2 * slow_add_s + message_s + RELU + add_s
    assert fast_s < mixed_s < slow_s and mixed_s == pytest.approx(late + SLOW_RELU + SLOW_SENT)


def test_reports_name_both_kinds() -> None:
    program = step("dp=2").compiled
    with assume_device(BOTH):
        assert "(round and slow: ; planted)" in summary(program)
        assert figures(program)["device"] == head(program, "mlp").device == "round and slow"
        assert figures(program)["seconds"]["together"] == pytest.approx(program_seconds(program, SLOW).total)


def test_what_may_be_held_is_a_ranks_own_memory(monkeypatch: pytest.MonkeyPatch, patches_behind: None) -> None:
    """Without what is tried of other requests, which an error tells and which takes long."""
    monkeypatch.setattr(ChangeTrials, "find_changes", lambda _: FittingChanges([]))
    h100 = device("h100")

    def on(*memory: int) -> dict[int, Device]:
        return {rank: replace(h100, memory_bytes=size) for rank, size in enumerate(memory)}

    program = compiled(device="cuda")
    needs = [one.total for one in peak_memory.by_rank(program)]
    assert needs[0] != needs[1]
    with assume_device(on(*needs)):
        kept = compiled(device="cuda")
        assert kept.pipeline is not None and program.pipeline is not None and kept.pipeline.schedule.name == program.pipeline.schedule.name
    for rank in (0, 1):
        memory = [needs[0], needs[1]]
        memory[rank] = 4_000
        said = rf"4,000 bytes \(the device's memory\), but \w+ with microbatches=2 holds [\d,]+ on rank {rank}"
        with assume_device(on(*memory)), pytest.raises(meshc.PlanError, match=said):
            compiled(device="cuda")
