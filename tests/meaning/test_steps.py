"""Layers of torch that take one step after another (LSTM, GRU, RNN): one operator, with a split sequence taken in turn, or rows divided."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshc.ir import calls, op_name
from meshc.ops.rnn import KINDS
from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.formulas.recurrence_traffic import Recurrence, traffic
from tests.models import Case
from tests.zoo.run import adamw

ROWS, POSITIONS, WIDTH = 4, 7, 8
"""Two ranks have 4 and 3 positions, three 3, 3 and 1, four 2, 2, 2 and 1, five 2, 2, 2, 1 and none."""
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "tanh": nn.RNN, "relu": nn.RNN}


class Stepped(nn.Module):
    """`begun`: the state before the first step is made of the input, and the last one is part of what is returned."""

    def __init__(self, kind: str, begun: bool, **how: bool | int | str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        more = {"nonlinearity": kind} if kind in ("tanh", "relu") else {}
        self.layer = LAYERS[kind](WIDTH, WIDTH, batch_first=True, **how, **more)
        self.last = nn.Linear(int(how.get("proj_size", WIDTH)) * (1 + bool(how.get("bidirectional"))), WIDTH)
        self.begun = begun

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.begun:
            return self.last(self.layer(x)[0]).square().mean()
        start = x.mean(1).sin().expand(self.layer.num_layers * (1 + self.layer.bidirectional), -1, -1).contiguous()
        out, end = self.layer(x, (start, start.cos()) if isinstance(self.layer, nn.LSTM) else start)
        h, c = end if isinstance(end, tuple) else (end, end)
        return self.last(out).square().mean() + h.square().mean() + c.sin().mean()


@cache
def captured(kind: str, begun: bool = False, positions: int = POSITIONS, rows: int = ROWS, **how: bool | int | str) -> Captured:
    torch.manual_seed(0)
    case = Case(kind, Stepped(kind, begun, **how), {"x": torch.randn(rows, positions, WIDTH)})
    return Captured(case, train=True, double=True)


def sent(source: Captured) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in summary.collectives(source.latest):
        if use.kind != "all_reduce":
            found[use.kind] = found.get(use.kind, 0) + use.bytes_per_rank
    return found


def parts_of(source: Captured) -> int:
    """In how many parts rows are, in each layer alike."""
    turns = [node for node in calls(source.latest.stages["main"].graph) if op_name(node).startswith("meshc.rnn_turn")]
    (found,) = {node.args[-3] for node in turns}
    assert isinstance(found, int)
    return found


def notes(source: Captured) -> list[str]:
    return [str(note) for note in source.latest.notes if "step after another" in str(note)]


STEPS = [
    ("lstm", "cp=2", "cp: seq", False, {}),
    ("gru", "cp=3", "cp: seq", True, {"bidirectional": True}),
    broad("lstm", "cp=3", "cp: seq", True, {"bidirectional": True, "num_layers": 2}),
    broad("lstm", "cp=4", "cp: seq", True, {}),
    broad("lstm", "cp=5", "cp: seq", False, {"bias": False}),
    broad("lstm", "dp=2,cp=2", "dp: batch\ncp: seq", True, {}),
    broad("gru", "cp=2", "cp: seq", False, {"num_layers": 2}),
    broad("gru", "cp=4", "cp: seq", True, {"bias": False}),
    broad("gru", "dp=2,cp=2", "dp: batch\ncp: seq", True, {}),
    broad("tanh", "cp=2", "cp: seq", True, {"bidirectional": True}),
    broad("tanh", "cp=3", "cp: seq", False, {"num_layers": 2}),
    broad("tanh", "dp=2,cp=2", "dp: batch\ncp: seq", True, {}),
    broad("relu", "cp=4", "cp: seq", True, {}),
]


@pytest.mark.parametrize("kind, mesh, plan, begun, how", STEPS)
def test_steps_are_taken_in_turn(kind: str, mesh: str, plan: str, begun: bool, how: dict[str, int]) -> None:
    """Nothing but states is sent, from each rank to the next: of a layer and direction, forward and backward, that of a part at each turn
    but the last. A note says how much of the time a rank has no step to take."""
    source = captured(kind, begun, **how)
    source.verify_training(mesh, plan, adamw)
    ranks = source.latest.axis_sizes["cp"]
    parts, rows = parts_of(source), ROWS // source.latest.axis_sizes.get("dp", 1)
    each = KINDS[kind].states * (rows // parts) * WIDTH * 8
    layers = how.get("num_layers", 1) * (1 + how.get("bidirectional", False))
    chain = layers * (parts + ranks - 2) * each
    assert sent(source) == {"halo": 2 * chain}
    assert traffic(source.latest) == [Recurrence("layer", "rnn", ("cp",), ranks, parts, (chain, chain), (chain, chain))]
    (note,) = notes(source)
    assert note.startswith(f"layer takes one step after another: along cp {ranks} ranks hand its state on, with rows in {parts} part")
    assert "`cp: batch@layer > seq`" in note


@pytest.mark.parametrize(
    "kind, both, ranks",
    [("lstm", False, 2), broad("gru", False, 2), broad("tanh", False, 2), broad("lstm", True, 2), broad("gru", False, 3)],
)
def test_rows_are_divided(kind: str, both: bool, ranks: int) -> None:
    """What goes in and what comes out changes places, forward and backward: rows of whole sequences for positions of all rows. Nothing is
    sent between: sums of gradients, which autograd makes in no module, lie where their parts do."""
    source = captured(kind, bidirectional=both)
    source.verify_training(f"cp={ranks}", "cp: batch@layer > seq", adamw)
    assert not notes(source)
    tile = -(-ROWS // ranks) * -(-POSITIONS // ranks) * ranks * WIDTH * 8
    assert sent(source) == {"all_to_all": 2 * (2 + both) * tile}


def test_nothing_is_said_where_batch_is_split() -> None:
    captured("lstm").verify_training("cp=2", "cp: batch", adamw)
    assert not notes(captured("lstm"))


@pytest.mark.parametrize("kind", ["lstm", broad("gru")])
def test_what_goes_into_gates_is_split(kind: str) -> None:
    """By what a product makes of the input; the steps have all of it, which a note says."""
    source = captured(kind, begun=True)
    source.verify_training("tp=2", "tp: layer.weight_ih_l0.0", adamw)
    shapes = {op_name(node): node.meta["meshc"] for node in calls(source.latest.stages["main"].graph)}
    assert "meshc.rnn" in shapes
    (note,) = notes(source)
    assert note.startswith("layer takes one step after another, in each of which h is whole: the 2 ranks along tp all take the same steps")
    assert note.endswith("`tp: batch@layer` before what the plan has for tp divides its rows instead")
    source.verify_training("tp=2", "tp: batch@layer > layer.weight_ih_l0.0", adamw)
    assert not notes(source)


@pytest.mark.broad
def test_an_lstm_with_projections_is_gathered() -> None:
    """It stays torch's own, step by step, on every rank, and a note says what that takes."""
    source = captured("lstm", proj_size=WIDTH // 2)
    source.verify_training("cp=2", "cp: seq", adamw)
    assert set(sent(source)) == {"all_gather"}
    (note,) = notes(source)
    work = ROWS * POSITIONS * 2 * (4 * WIDTH * WIDTH // 2 + WIDTH * WIDTH // 2)  # what the input makes of gates is a product outside
    assert note.startswith("layer (LSTM)") and f"each of 2 ranks takes all steps of all rows, {work / 1e9:,.3g} GFLOP forward" in note


@pytest.mark.parametrize("plan", [None, "cp: seq"])
def test_a_program_does_not_grow_with_the_sequence(plan: str | None) -> None:
    lengths = [sum(1 for _ in calls(captured("lstm", positions=size).program("cp=2", plan).stages["main"].graph)) for size in (7, 63)]
    assert lengths[0] == lengths[1]
