"""Layers of torch that take one step after another (LSTM, GRU, RNN), with a split sequence: all steps on every rank, or rows divided."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from meshc.report import summary
from tests.broad import broad
from tests.captured import Captured
from tests.models import Case
from tests.zoo.run import adamw

ROWS, POSITIONS, WIDTH = 4, 6, 8
LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


class Stepped(nn.Module):
    def __init__(self, kind: str, **how: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = LAYERS[kind](WIDTH, WIDTH, batch_first=True, **how)
        self.last = nn.Linear(WIDTH * (1 + how.get("bidirectional", False)), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x))[0]).square().mean()


@cache
def captured(kind: str, both: bool = False) -> Captured:
    torch.manual_seed(0)
    case = Case(kind, Stepped(kind, bidirectional=both), {"x": torch.randn(ROWS, POSITIONS, WIDTH)})
    return Captured(case, train=True, double=True)


def sent(source: Captured) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in summary.collectives(source.latest):
        if use.kind != "all_reduce":
            found[use.kind] = found.get(use.kind, 0) + use.bytes_per_rank
    return found


@pytest.mark.parametrize("kind", ["rnn", broad("gru"), broad("lstm")])
def test_every_rank_takes_all_steps(kind: str) -> None:
    """And a note says so, with the line that divides rows."""
    source = captured(kind)
    source.verify_training("cp=2", "cp: seq", adamw)
    assert set(sent(source)) == {"all_gather"}
    (note,) = [str(note) for note in source.latest.notes if "step after another" in str(note)]
    assert note.startswith(f"layer ({kind.upper()})") and "`cp: batch@layer > seq`" in note


@pytest.mark.parametrize(
    "kind, both, ranks",
    [("lstm", False, 2), broad("gru", False, 2), broad("rnn", False, 2), broad("lstm", True, 2), broad("gru", False, 3)],
)
def test_rows_are_divided(kind: str, both: bool, ranks: int) -> None:
    """What goes in and what comes out changes places, forward and backward: rows of whole sequences for positions of all rows. Nothing is
    sent between: sums of gradients, which autograd makes in no module, lie where their parts do."""
    source = captured(kind, both)
    source.verify_training(f"cp={ranks}", "cp: batch@layer > seq", adamw)
    assert not [note for note in source.latest.notes if "step after another" in str(note)]
    tile = -(-ROWS // ranks) * -(-POSITIONS // ranks) * ranks * WIDTH * 8
    assert sent(source) == {"all_to_all": 2 * (2 + both) * tile}


def test_no_note_where_batch_is_split() -> None:
    captured("lstm").verify_training("cp=2", "cp: batch", adamw)
    assert not [note for note in captured("lstm").latest.notes if "step after another" in str(note)]
