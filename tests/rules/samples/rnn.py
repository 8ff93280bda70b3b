"""Steps of recurrent layers, and what puts turns together."""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.rnn import KINDS
from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

STEPS, ROWS, H = 7, 6, 3
"""Of which two ranks have 4 and 3, three 3, 3 and 1, six 2, 2, 2, 1 and none; rows in one part, in two, three or six."""


def _forward(kind: str, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = KINDS[kind]
    return f(STEPS, rows, how.gates * H), f(how.gates * H, H), f(how.gates * H), f(how.states, rows, H)


def _backward(kind: str, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    how = KINDS[kind]
    return f(STEPS, rows, H), f(how.states, rows, H), f(STEPS, rows, how.kept * H).sigmoid(), f(how.gates * H, H)


for kind in ("lstm", "gru", "tanh", "relu"):
    sample(ours.rnn.default, kind, *_forward(kind), kind == "gru")
    sample(ours.rnn_backward.default, kind, *_backward(kind), kind == "gru")
sample(ours.rnn.default, "lstm", *_forward("lstm", 5)[:2], None, None, True)
sample(ours.rnn_backward.default, "lstm", _backward("lstm", 5)[0], None, *_backward("lstm", 5)[2:], True)
sample(ours.rnn_turn.default, "lstm", *_forward("lstm"), f(1, 2, 3, H), False, 5, 1, 2, 1, 2)
sample(ours.rnn_turn_backward.default, "gru", *_backward("gru")[:2], f(1, 1, 3, H), *_backward("gru")[2:], False, 5, 1, 2, 1, 2)
sample(ours.in_turn.default, [f(5, 3), f(5, 3), f(5, 3)], 1, 1, 2, False)
