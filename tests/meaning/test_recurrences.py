"""A recurrence along a split sequence means what it means on one device, and sends what the formula says."""

from __future__ import annotations

from functools import cache

import pytest

from meshc.check import check_program
from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.formulas.recurrence_traffic import Recurrence, traffic
from tests.zoo.experts import FAMILIES as EXPERTS
from tests.zoo.recurrent import FAMILIES as RECURRENT
from tests.zoo.run import adamw, case

BATCH, TOKENS, CHANNELS, STATE, LAYERS = 4, 12, 64, 8, 2
"""Of the small Mamba. Five ranks have 3, 3, 3, 3 and no positions, eight two or none."""
HEADS, KEYS, VALUES = 4, 8, 6
"""Of the small Qwen3-Next's gated delta rule, which one of its layers has."""
WIDTH = 32
"""Of the small RWKV."""


@cache
def captured(kind: str) -> Captured:
    families = {**EXPERTS, **RECURRENT}
    found = families[kind].case(kind) if kind in families else case(kind)
    return Captured(found, train=True, double=True)


CASES = [
    ("mamba", "cp=2", "cp: seq"),
    broad("mamba", "cp=5", "cp: seq"),
    broad("mamba", "cp=3", "cp: seq"),
    broad("mamba", "cp=4", "cp: seq"),
    broad("mamba", "cp=8", "cp: seq"),
    broad("mamba", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("mamba", "cp=2,tp=2", "cp: seq\ntp: ffn"),
    broad("mamba", "tp=2", "tp: ffn"),
    broad("mamba", "tp=3,dp=2", "dp: batch\ntp: ffn"),
    broad("jamba", "cp=2", "cp: seq"),
    broad("jamba", "cp=3", "cp: seq"),
    broad("jamba", "dp=2,tp=2", "dp: batch\ntp: heads, ffn"),
    broad("rwkv", "cp=3", "cp: seq"),
    broad("rwkv", "cp=2", "cp: seq"),
    broad("rwkv", "cp=5", "cp: seq"),
    broad("rwkv", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("rwkv", "cp=2,tp=2", "cp: seq\ntp: ffn"),
    broad("falcon_mamba", "cp=2,tp=2", "cp: seq\ntp: ffn"),
    broad("zamba", "cp=3", "cp: seq"),
    broad("zamba", "dp=2,tp=2", "dp: batch\ntp: heads, ffn"),
    broad("qwen3_next", "cp=3", "cp: seq"),
    broad("qwen3_next", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("qwen3_next", "dp=2", "dp: batch"),
    broad("qwen3_next", "tp=2", "tp: heads, ffn"),
    ("qwen3_next", "cp=2", "cp: seq"),
    broad("qwen3_next", "cp=5", "cp: seq"),
    broad("qwen3_next", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("qwen3_next", "tp=4", "tp: heads, ffn"),
    broad("qwen3_5", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("olmo_hybrid", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
]
OPERATORS = {"qwen3_next": "delta_rule", "qwen3_5": "delta_rule", "olmo_hybrid": "delta_rule"}
"""Of the others it is `recurrence`."""


@pytest.mark.parametrize("kind, mesh, plan", CASES)
def test_a_training_step_is_the_models_own(kind: str, mesh: str, plan: str) -> None:
    """Loss, every gradient, and parameters after two steps."""
    source = captured(kind)
    source.verify_training(mesh, plan, adamw, recurrence="join")
    targets = [str(node.target) for node in source.latest.stages["main"].graph.nodes]
    operator = OPERATORS.get(kind, "recurrence")
    assert f"meshc.{operator}.default" in targets
    assert (f"meshc.{operator}_end.default" in targets) == ("cp" in mesh)


TURNS = [
    ("mamba", "cp=3", "cp: seq"),
    ("qwen3_next", "cp=2", "cp: seq"),
    broad("mamba", "cp=2", "cp: seq"),
    broad("mamba", "cp=4", "cp: seq"),
    broad("mamba", "cp=5", "cp: seq"),
    broad("mamba", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("mamba", "cp=2,tp=2", "cp: seq\ntp: ffn"),
    broad("jamba", "cp=3", "cp: seq"),
    broad("rwkv", "cp=3", "cp: seq"),
    broad("rwkv", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("falcon_mamba", "cp=4", "cp: seq"),
    broad("zamba", "cp=3", "cp: seq"),
    broad("qwen3_next", "cp=3", "cp: seq"),
    broad("qwen3_next", "cp=4", "cp: seq"),
    broad("qwen3_next", "dp=2,cp=2", "dp: batch\ncp: seq"),
    broad("qwen3_next", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
    broad("qwen3_5", "cp=3", "cp: seq"),
    broad("olmo_hybrid", "cp=2,tp=2", "cp: seq\ntp: heads, ffn"),
]


@pytest.mark.parametrize("kind, mesh, plan", TURNS)
def test_a_training_step_in_turns(kind: str, mesh: str, plan: str) -> None:
    """The same where ranks hand the state on: nothing is made of a stretch but its steps, unless tiles have padding: the state that a
    stretch begins with, which a backward of a recurrence wants, is then that of the last tile with positions."""
    source = captured(kind)
    source.verify_training(mesh, plan, adamw, recurrence="turns")
    targets = [str(node.target) for node in source.latest.stages["main"].graph.nodes]
    operator = OPERATORS.get(kind, "recurrence")
    padded = kind == "mamba" and TOKENS % source.latest.axis_sizes["cp"] > 0
    assert f"meshc.{operator}_turn.default" in targets and (f"meshc.{operator}_end.default" in targets) == padded


@pytest.mark.parametrize("kind, ranks", [("mamba", 3), broad("mamba", 2), broad("mamba", 4), ("qwen3_next", 2), broad("qwen3_next", 3)])
def test_what_is_sent_in_turns(kind: str, ranks: int) -> None:
    """Of rows in c parts the state of a part at each turn but the last, forward and backward; backward also where stretches begin, which of
    a delta rule takes a chain of states of its own."""
    source = captured(kind)
    program = source.program(f"cp={ranks}", "cp: seq", recurrence="turns")
    operator = OPERATORS.get(kind, "recurrence")
    turns = [node for node in program.stages["main"].graph.nodes if f"meshc.{operator}" in str(node.target) and "_turn" in str(node.target)]
    parts = {node.target: node.args[-3] for node in turns}
    assert len(parts) == (2 if kind == "mamba" else 3)
    state = BATCH * (CHANNELS * STATE if kind == "mamba" else HEADS * KEYS * VALUES) * 8
    layers = LAYERS if kind == "mamba" else 1
    chains = sum((count + ranks - 2) * (state // count) for count in parts.values())
    assert sent(source, "halo", operator) == layers * (chains + state)
    assert sent(source, "all_gather", operator) == 0
    found = traffic(source.latest)
    assert all(one.kind == operator.replace("_", " ") and one.ranks == ranks and one.turns == one.parts + ranks - 1 for one in found)
    assert total(found, "sent") == total(found, "formula") == layers * (chains + state)


@pytest.mark.parametrize("kind", [broad("qwen3_next"), broad("zamba"), broad("jamba")])
def test_a_call_gives_its_last_states(kind: str) -> None:
    """Of the sequence's end, whole on every rank, beside the keys and values of layers with attention."""
    families = {**EXPERTS, **RECURRENT}
    source = Captured(families[kind].case(kind), train=False, double=True)
    source.verify_inference("cp=3", "cp: seq")
    source.verify_inference("tp=2", "tp: heads, ffn")


@pytest.mark.parametrize("kind", [broad("mamba"), broad("qwen3_next"), broad("rwkv")])
def test_stages_of_a_pipeline(kind: str) -> None:
    captured(kind).verify_training("pp=2,cp=2", "cp: seq", adamw, microbatches=2)


@pytest.mark.parametrize("ranks", [3, broad(2)])
def test_what_is_sent_for_a_recurrence(ranks: int) -> None:
    """Forward the product and the end of each stretch, backward those of the gradient, and which h is the last: a position of t of each."""
    source = captured("mamba")
    source.verify_training(f"cp={ranks}", "cp: seq", adamw, recurrence="join")
    position = BATCH * CHANNELS * STATE * 8
    assert sent(source, "all_gather", "recurrence") == LAYERS * (2 + 4) * position * ranks
    both = 2 * position * ranks, 4 * position * ranks
    assert traffic(source.latest) == [
        Recurrence(f"backbone.layers.{layer}.mixer", "recurrence", ("cp",), ranks, 0, both, both) for layer in range(LAYERS)
    ]


@pytest.mark.parametrize("ranks", [2, broad(3)])
def test_what_is_sent_for_a_delta_rule(ranks: int) -> None:
    """Forward the product and the end of each stretch, backward those again and what it makes of a gradient; the convolution's edges."""
    source = captured("qwen3_next")
    source.verify_training(f"cp={ranks}", "cp: seq", adamw, recurrence="join")
    check_program(source.latest, "program.json")
    row = BATCH * HEADS * KEYS * 8
    assert sent(source, "all_gather", "delta_rule") == row * (KEYS + VALUES + KEYS + 2 * VALUES) * ranks
    (told,) = traffic(source.latest)
    assert told.sent == told.formula == (row * (KEYS + VALUES) * ranks, row * (KEYS + 2 * VALUES) * ranks)
    channels, before = KEYS * HEADS + VALUES * HEADS, 3  # half as many heads of queries, as many of keys; a convolution of four taps
    sides = min(ranks - 1, 2)  # windows reach behind too, where the kernel is zero
    for kind, times in (("halo", 2), ("halo_sum", 1)):
        assert sent(source, kind, "convolution") == times * BATCH * channels * before * 8 * sides


@pytest.mark.parametrize("ranks", [broad(2), broad(3)])
def test_what_is_sent_for_an_average_that_decays(ranks: int) -> None:
    """Of RWKV: the largest exponent of each stretch, what its two sums and their gradients come to; and of each shift a position."""
    source = captured("rwkv")
    source.verify_training(f"cp={ranks}", "cp: seq", adamw, recurrence="join")
    position = BATCH * WIDTH * 8
    assert sent(source, "all_gather", "cummax") == LAYERS * position * ranks
    assert sent(source, "all_gather", "recurrence") == LAYERS * 2 * (2 + 4) * position * ranks
    assert sent(source, "halo", "constant_pad_nd") == LAYERS * (5 + 4) * position  # the peaks' shift has no gradient


def total(found: list[Recurrence], what: str) -> int:
    return sum(sum(getattr(one, what)) for one in found)


def sent(source: Captured, kind: str, reason: str) -> int:
    found = [use for use in summary.collectives(source.latest) if use.kind == kind and reason in use.reason]
    return sum(use.bytes_per_rank for use in found)
